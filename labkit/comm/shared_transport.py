"""Point-to-point messages through shared memory: the fast way between ranks of one machine.

The sender copies a segment of its tensor into a free slot; the receiver copies or adds it directly
from the slot, which is then free again. A segment (``SEGMENT_BYTES``) is small enough to stay in
the cache from the copy to the reduction. A few slots (``NUM_SLOTS``) let the sender run ahead
while the receiver is busy; more slots would not fit into the cache.
"""

import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from labkit.comm.shared_memory import NUM_SLOTS, SEGMENT_BYTES, Arena, Semaphore
from labkit.comm.transport import Sent, Transport, as_bytes
from labkit.comm.waiting import Waiter

# One half of an exchange: it yields each semaphore it needs next, and the peer that posts it.
Half = Iterator[tuple[Semaphore, int]]


class Channel:
    """One edge, as one of its two ends sees it: the sender fills slots, the receiver empties them.

    The sender calls ``reserve`` and ``commit``, the receiver ``arrive`` and ``release``. Between
    the two calls the slot belongs to the caller.

    Args:
        wait: ``wait(semaphore, peer)`` decrements a semaphore; PeerLostError if the peer is lost.
        sent: the sender's counters; None at the receiving end, which counts nothing.
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
        self.ready, self.filled, self.free, _ = arena.semaphores(source, destination)
        self.is_sender = sent is not None
        self._peer = destination if self.is_sender else source
        self._wait = wait
        self._slots = arena.slots(source, destination)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._next = 0
        self._sent = sent or Sent()
        self._slot_bytes = 0

    def reserve(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The next free slot, as a tensor [num_elements] of ``dtype``; may wait."""
        self._wait(self.free, self._peer)
        return self.slot(num_elements, dtype)

    def commit(self, begins_message: bool = True) -> None:
        """Send the slot, which now holds the first segment of a message or a later one."""
        self._sent.count(self._slot_bytes, begins_message)
        self._next = (self._next + 1) % NUM_SLOTS
        self.filled.post()

    def arrive(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The next filled slot, as a tensor [num_elements] of ``dtype``; may wait."""
        self._wait(self.filled, self._peer)
        return self.slot(num_elements, dtype)

    def release(self) -> None:
        """Give the slot, which has been read, back to the sender."""
        self._next = (self._next + 1) % NUM_SLOTS
        self.free.post()

    def slot(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The current slot, as a tensor [num_elements] of ``dtype``; does not wait.

        For a sender that already holds ``free``, or a receiver that holds ``filled``.
        """
        self._slot_bytes = num_elements * dtype.itemsize
        key = self._next, num_elements, dtype
        if key not in self._views:
            if len(self._views) > 64:
                self._views.clear()
            self._views[key] = self._slots[self._next].view(dtype)[:num_elements]
        return self._views[key]


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
            *_, met_right = self.arena.semaphores(self.rank, right)
            *_, met_left = self.arena.semaphores(left, self.rank)
            met_right.post()
            self.waiter.wait(met_left, left)
            distance *= 2

    def channel_to(self, dst: int) -> Channel:
        return self._channel(self.rank, dst)

    def channel_from(self, src: int) -> Channel:
        return self._channel(src, self.rank)

    def _channel(self, source: int, destination: int) -> Channel:
        edge = source, destination
        if edge not in self._channels:
            sent = self.sent.to[destination] if self.rank == source else None
            self._channels[edge] = Channel(self.arena, *edge, self.waiter.wait, sent)
        return self._channels[edge]

    def close(self) -> None:
        self._channels.clear()

    def set_timeout(self, timeout_s: float) -> None:
        self.waiter.timeout_s = timeout_s

    def abandon(self) -> None:
        self.waiter.abandoned = True

    def _sending(self, flat: Tensor, dst: int) -> Half:
        channel = self.channel_to(dst)
        yield channel.ready, dst
        begins_message = True
        for segment in split_segments(flat, channel.segment_bytes):
            yield channel.free, dst
            channel.slot(segment.numel(), flat.dtype).copy_(segment)
            channel.commit(begins_message)
            begins_message = False

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
    """``flat`` [n] in segments of at most ``most`` elements."""
    # Splitting a small message would take longer than copying it.
    return flat.split(most) if flat.numel() > most else (flat,)
