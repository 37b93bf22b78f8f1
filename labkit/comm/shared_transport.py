"""Point-to-point messages through shared memory: the fast way between ranks of one machine."""

import os
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from labkit.comm.channels import Channel
from labkit.comm.shared_memory import Arena, Semaphore
from labkit.comm.transport import Transport, as_bytes
from labkit.comm.waiting import Waiter

# One half of an exchange: it yields each semaphore it needs next, and the peer that posts it.
Half = Iterator[tuple[Semaphore, int]]


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
        self._new_channel: Callable[..., Channel] = Channel
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
            self._channels[edge] = self._new_channel(self.arena, *edge, self.waiter.wait, sent)
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
            channel.writable(segment.numel(), flat.dtype).copy_(segment)
            channel.commit(begins_message)
            begins_message = False

    def _receiving(self, flat: Tensor, src: int, take: Callable[[Tensor, Tensor], object]) -> Half:
        """Receive in segments; ``take(segment, slot)`` copies or adds the slot's values."""
        channel = self.channel_from(src)
        channel.ready.post()
        for semaphore in channel.opening():
            yield semaphore, src
        for segment in split_segments(flat, channel.segment_bytes // flat.itemsize):
            yield channel.filled, src
            take(segment, channel.readable(segment.numel(), flat.dtype))
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
