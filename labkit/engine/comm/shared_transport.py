"""Point-to-point messages through shared memory: the fast way between ranks of one machine.

The sender copies a segment of its tensor into a free slot; the receiver copies or adds it directly
from the slot, which is then free again. A segment (``SEGMENT_BYTES``) is small enough to stay in
the cache from the copy to the reduction. A few slots (``NUM_SLOTS``) let the sender run ahead.

Waking a sleeping process takes about as long as sending a small message. So a rank that waits
first spins for a short while: it checks the semaphore again and again, and yields its core between
two checks. Then it sleeps on the semaphore, and wakes up ten times per second to check whether the
peer's process still runs. Where more processes want to run than there are cores, a yielded core
comes back only after milliseconds: then a rank sleeps without spinning.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from labkit.engine.comm.board import LEFT, LOST, Board
from labkit.engine.comm.deadlock import uneven_collectives
from labkit.engine.comm.shared_memory import (
    NUM_SLOTS,
    NUM_WINDOWS,
    SEGMENT_BYTES,
    WINDOW_BYTES,
    Arena,
    Semaphore,
    is_running,
    share_blocks,
)
from labkit.engine.comm.transport import Sent, Transport, as_bytes
from labkit.engine.errors import PeerLostError

# The interval at which a waiting rank checks whether its peer is still alive.
LOOK_S = 0.1
_SPIN_S = 200e-6
# A yield that takes longer than this has given the core to a process that had work to do. The
# rank then does not spin for so many times as long: it loses a small share of its time at most.
_LONG_YIELD_S = 0.5e-3
_NO_SPIN_FOR = 10
# A process cannot sleep on two semaphores at once, so it sleeps on each in turn.
_TURN_S = 1e-3

# One half of an exchange: it yields each semaphore it needs next, and the peer that posts it.
Half = Iterator[tuple[Semaphore, int]]


class Waiter:
    """Waits, as ``rank``, for semaphores that other ranks post; at most ``timeout_s`` for each."""

    def __init__(self, board: Board, rank: int, timeout_s: float):
        self.timeout_s = timeout_s
        self._board = board
        self._rank = rank
        # Once set, every wait ends with an error, including a wait in another thread.
        self.abandoned = False
        self._spins_from_s = 0.0

    def wait(self, semaphore: Semaphore, peer: int) -> None:
        """Wait until ``peer`` has posted the semaphore, and decrement it; or PeerLostError."""
        if not semaphore.try_wait():
            self.wait_for_first([(semaphore, peer)])

    def wait_for_first(self, needs: Sequence[tuple[Semaphore, int]]) -> int:
        """Wait for the first of several (semaphore, peer), decrement it, and return its index."""
        started_s = looked_s = now_s = time.monotonic()
        sleep_s = LOOK_S if len(needs) == 1 else _TURN_S
        while True:
            spins = now_s - started_s < _SPIN_S and now_s >= self._spins_from_s
            for index, (semaphore, _) in enumerate(needs):
                if semaphore.try_wait() or (not spins and semaphore.wait(sleep_s)):
                    return index
            before_s = now_s
            if spins:
                os.sched_yield()
            now_s = time.monotonic()
            if spins and now_s - before_s > _LONG_YIELD_S:
                self._spins_from_s = now_s + _NO_SPIN_FOR * (now_s - before_s)
            if now_s - looked_s >= LOOK_S:
                looked_s = now_s
                for index, (semaphore, peer) in enumerate(needs):
                    loss = "this rank is ending" if self.abandoned else why_gone(self._board, peer)
                    if not loss and now_s - started_s > self.timeout_s:
                        limit = f"within the timeout of {self.timeout_s:g} s"
                        loss = f"nothing from rank {peer} {limit}"
                    # A post that the peer made before its end still counts.
                    if loss and semaphore.try_wait():
                        return index
                    if loss:
                        loss += uneven_collectives(self._board, self._rank, peer)
                        raise PeerLostError(loss, rank=peer)


def why_gone(board: Board, peer: int) -> str:
    """Say why ``peer`` will send nothing more; empty while it may still send."""
    if reason := board.gave_up():
        return reason
    pid = int(board.ranks[peer]["pid"])
    state = int(board.ranks[peer]["state"])
    if state == LEFT:
        return f"rank {peer} has left: its process group was destroyed, or its program has ended"
    # The board of another host does not say the process id.
    if state == LOST or (pid and not is_running(pid)):
        number = f" (pid {pid})" if pid else ""
        return f"the process of rank {peer}{number} has ended"
    return ""


class Channel:
    """One edge, as one of its two ends sees it: the sender fills slots, the receiver empties them.

    The sender calls ``reserve`` and ``commit``, the receiver ``arrive`` and ``release``. Between
    the two calls the slot belongs to the caller. ``sent`` are the sender's counters; the receiver,
    which counts nothing, has None.
    """

    segment_bytes = SEGMENT_BYTES

    def __init__(
        self,
        arena: Arena,
        source: int,
        destination: int,
        wait: Callable[[Semaphore, int], None],
        sent: Sent | None,
    ):
        self.ready, self.filled, self.free, *_ = arena.semaphores(source, destination)
        self._peer = source if sent is None else destination
        self._wait = wait
        self._sent = sent or Sent()
        self._slots = arena.slots(source, destination)
        self._next = self._slot_bytes = 0

    def reserve(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The next free slot as a tensor [num_elements]; may wait."""
        self._wait(self.free, self._peer)
        return self.slot(num_elements, dtype)

    def commit(self, begins_message: bool = True) -> None:
        """Send the slot, which now holds the first segment of a message or a later one."""
        self._sent.count(self._slot_bytes, begins_message)
        self._next = (self._next + 1) % NUM_SLOTS
        self.filled.post()

    def arrive(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The next filled slot as a tensor [num_elements]; may wait."""
        self._wait(self.filled, self._peer)
        return self.slot(num_elements, dtype)

    def release(self) -> None:
        """Give the slot, which has been read, back to the sender."""
        self._next = (self._next + 1) % NUM_SLOTS
        self.free.post()

    def slot(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The current slot, for a sender with ``free`` or a receiver with ``filled`` in hand."""
        self._slot_bytes = num_elements * dtype.itemsize
        return self._slots[self._next].view(dtype)[:num_elements]


class Windows:
    """One hop from every rank to all others: each writes its own window, and reads the others'.

    A round is a ``write`` and a ``read`` on every rank. Nothing says that a window has been read:
    a rank that has read round n of all others knows that they have read round n - 2, as each
    writes at most one round ahead of what it has read. So four windows take turns.
    """

    window_bytes = WINDOW_BYTES

    def __init__(self, transport: "SharedTransport"):
        arena = transport.arena
        self._rank = transport.rank
        self._wait = transport.waiter.wait
        self._windows = [arena.windows(rank) for rank in range(arena.world_size)]
        self._sent = transport.sent.to
        self._peers = [rank for rank in range(arena.world_size) if rank != self._rank]
        self._signals_to = {peer: arena.semaphores(self._rank, peer)[-1] for peer in self._peers}
        self._signals_from = {peer: arena.semaphores(peer, self._rank)[-1] for peer in self._peers}
        self._num_written = 0
        self._num_read = 0

    def write(self, values: Tensor, begins_message: bool = True) -> None:
        """Show ``values`` [n] to all others, as a message to each or a later segment of it."""
        window = self._windows[self._rank][self._num_written % NUM_WINDOWS]
        window.view(values.dtype)[: values.numel()].copy_(values)
        self._num_written += 1
        for peer in self._peers:
            self._sent[peer].count(values.nbytes, begins_message)
            self._signals_to[peer].post()

    def read(self, num_elements: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the values of each rank in the next round [num_elements]; may wait."""
        number = self._num_read % NUM_WINDOWS
        for rank, windows in enumerate(self._windows):
            if rank != self._rank:
                self._wait(self._signals_from[rank], rank)
            yield windows[number].view(dtype)[:num_elements]
        self._num_read += 1

    def barrier(self) -> None:
        """Wait until all ranks have called it: what they wrote before may be read."""
        for signal in self._signals_to.values():
            signal.post()
        for peer, signal in self._signals_from.items():
            self._wait(signal, peer)


class SharedTransport(Transport):
    """Point-to-point through an arena, for ranks of one machine with tensors on the CPU.

    A send ends only when its receive has begun, as over gloo: a program that deadlocks on one
    transport deadlocks on the other, and the board explains it on both.
    ``timeout_s`` is the longest wait for one segment.
    """

    shares_memory = True

    def __init__(self, arena: Arena, rank: int, timeout_s: float):
        super().__init__()
        self.arena = arena
        self.rank = rank
        self.waiter = Waiter(arena.board, rank, timeout_s)
        self._channels: dict[tuple[int, int], Channel] = {}
        self.windows = Windows(self)
        arena.board.ranks[rank]["pid"] = os.getpid()

    def send(self, tensor: Tensor, dst: int) -> None:
        self._drive(self._sending(as_bytes(tensor), dst))

    def recv(self, tensor: Tensor, src: int) -> None:
        self._drive(self._receiving(as_bytes(tensor), src, Tensor.copy_))

    def recv_add(self, tensor: Tensor, src: int) -> None:
        self._drive(self._receiving(tensor.view(-1), src, Tensor.add_))

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        incoming = self._receiving(as_bytes(recv), src, Tensor.copy_)
        self._drive(self._sending(as_bytes(send), dst), incoming)

    def barrier(self) -> None:
        """Wait for all ranks: a dissemination barrier of ceil(log2 P) rounds.

        In round k a rank signals rank + 2^k and waits for rank - 2^k (mod P).
        """
        distance = 1
        while distance < self.arena.world_size:
            right = (self.rank + distance) % self.arena.world_size
            left = (self.rank - distance) % self.arena.world_size
            # A separate semaphore, so that a barrier is never taken for a message.
            *_, met, _ = self.arena.semaphores(self.rank, right)
            met.post()
            *_, met, _ = self.arena.semaphores(left, self.rank)
            self.waiter.wait(met, left)
            distance *= 2

    def share(self, num_bytes: int) -> list[Tensor] | None:
        """Map a new block of every rank [num_bytes]; see ``share_blocks``."""
        return share_blocks(self.arena.board, self.rank, num_bytes, self.barrier)

    def channel_to(self, dst: int) -> Channel:
        return self._channel(self.rank, dst, self.sent.to[dst])

    def channel_from(self, src: int) -> Channel:
        return self._channel(src, self.rank, None)

    def _channel(self, source: int, destination: int, sent: Sent | None) -> Channel:
        edge = source, destination
        if edge not in self._channels:
            channel = Channel(self.arena, source, destination, self.waiter.wait, sent)
            self._channels[edge] = channel
        return self._channels[edge]

    def close(self) -> None:
        self._channels.clear()
        self.windows = None

    def set_timeout(self, timeout_s: float) -> None:
        self.waiter.timeout_s = timeout_s

    def abandon(self) -> None:
        self.waiter.abandoned = True

    def _sending(self, flat: Tensor, dst: int) -> Half:
        channel = self.channel_to(dst)
        yield channel.ready, dst
        for number, segment in enumerate(split_segments(flat, channel.segment_bytes)):
            yield channel.free, dst
            channel.slot(segment.numel(), flat.dtype).copy_(segment)
            channel.commit(begins_message=number == 0)

    def _receiving(self, flat: Tensor, src: int, take: Callable[[Tensor, Tensor], object]) -> Half:
        """Receive in segments; ``take(segment, slot)`` copies or adds the slot's values."""
        channel = self.channel_from(src)
        channel.ready.post()
        for segment in split_segments(flat, channel.segment_bytes // flat.itemsize):
            yield channel.filled, src
            take(segment, channel.slot(segment.numel(), flat.dtype))
            channel.release()

    def _drive(self, *halves: Half) -> None:
        """Advance each half whenever its semaphore is posted, until all have ended."""
        needs = {half: next(half) for half in halves}
        while len(needs) > 1:
            able = [half for half, (semaphore, _) in needs.items() if semaphore.try_wait()]
            if not able:
                able = [list(needs)[self.waiter.wait_for_first(list(needs.values()))]]
            for half in able:
                if need := next(half, None):
                    needs[half] = need
                else:
                    del needs[half]
        for half, need in needs.items():
            self.waiter.wait(*need)
            for need in half:
                self.waiter.wait(*need)


def split_segments(flat: Tensor, most: int) -> Sequence[Tensor]:
    """Split ``flat`` [n] into segments of at most ``most`` elements."""
    # Splitting a small message would take longer than copying it.
    return flat.split(most) if flat.numel() > most else (flat,)
