"""Point-to-point messages through shared memory: the fast way between ranks of one machine."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labkit.comm.channels import Channel
from labkit.comm.sent import Sent
from labkit.comm.shared_memory import Arena, Semaphore
from labkit.comm.transport import Transport, as_bytes
from labkit.comm.waiting import Waiter


@dataclass(eq=False)
class _Half:
    """One half of an exchange under way: ``steps`` yields each semaphore that it needs next."""

    peer: int
    steps: Iterator[Semaphore]
    needs: Semaphore = field(init=False)

    def advance(self) -> bool:
        """Run to the next semaphore; False at the end."""
        needs = next(self.steps, None)
        if needs is None:
            return False
        self.needs = needs
        return True


class SharedTransport(Transport):
    """Point-to-point through an arena: ranks of one machine, tensors on the CPU.

    A send ends only when its receive has begun, as over gloo: a program that deadlocks on one
    transport deadlocks on the other, and the board explains it on both.

    Args:
        arena: of this machine's ranks.
        rank: this rank.
        timeout_s: the longest wait for one segment.
    """

    shares_memory = True

    def __init__(self, arena: Arena, rank: int, timeout_s: float = float("inf")):
        super().__init__()
        self.arena = arena
        self.rank = rank
        self.waiter = Waiter(arena.board, rank, timeout_s)
        self._channels: dict[tuple[int, int], Channel] = {}
        arena.board.ranks[rank]["pid"] = os.getpid()

    def send(self, tensor: Tensor, dst: int) -> None:
        self._drive([_Half(dst, self._sending(tensor, dst))])

    def recv(self, tensor: Tensor, src: int) -> None:
        self._drive([_Half(src, self._receiving(tensor, src))])

    def recv_add(self, tensor: Tensor, src: int) -> None:
        self._drive([_Half(src, self._adding(tensor, src))])

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        outgoing, incoming = self._sending(send, dst), self._receiving(recv, src)
        self._drive([_Half(dst, outgoing), _Half(src, incoming)])

    def barrier(self) -> None:
        """Dissemination, ceil(log2 P) rounds: in round k a rank meets those 2^k to either side."""
        distance = 1
        while distance < self.arena.world_size:
            right = (self.rank + distance) % self.arena.world_size
            left = (self.rank - distance) % self.arena.world_size
            # Not a message: one that is under way must never meet a barrier.
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
            self._channels[edge] = self._new_channel(source, destination, sent)
        return self._channels[edge]

    def _new_channel(self, source: int, destination: int, sent: Sent | None) -> Channel:
        return Channel(self.arena, source, destination, self.waiter.wait, sent)

    def close(self) -> None:
        self._channels.clear()

    def set_timeout(self, timeout_s: float) -> None:
        self.waiter.timeout_s = timeout_s

    def abandon(self) -> None:
        self.waiter.abandon()

    def _sending(self, tensor: Tensor, dst: int) -> Iterator[Semaphore]:
        channel = self.channel_to(dst)
        yield channel.ready
        begins_message = True
        for segment in split_segments(as_bytes(tensor), channel.segment_bytes):
            yield channel.free
            channel.writable(segment.numel(), torch.uint8).copy_(segment)
            channel.commit(begins_message)
            begins_message = False

    def _receiving(self, tensor: Tensor, src: int) -> Iterator[Semaphore]:
        channel = self.channel_from(src)
        channel.ready.post()
        yield from channel.opening()
        for segment in split_segments(as_bytes(tensor), channel.segment_bytes):
            yield channel.filled
            segment.copy_(channel.readable(segment.numel(), torch.uint8))
            channel.release()

    def _adding(self, tensor: Tensor, src: int) -> Iterator[Semaphore]:
        channel = self.channel_from(src)
        channel.ready.post()
        yield from channel.opening()
        for segment in split_segments(tensor.view(-1), channel.segment_bytes // tensor.itemsize):
            yield channel.filled
            segment += channel.readable(segment.numel(), segment.dtype)
            channel.release()

    def _drive(self, halves: list[_Half]) -> None:
        """Let each half continue whenever it can, until all have ended."""
        halves = [half for half in halves if half.advance()]
        while len(halves) > 1:
            able = [half for half in halves if half.needs.try_wait()]
            if not able:
                first = self.waiter.wait_for_first([(half.needs, half.peer) for half in halves])
                able = [halves[first]]
            for half in able:
                if not half.advance():
                    halves.remove(half)
        while halves:
            self.waiter.wait(halves[0].needs, halves[0].peer)
            if not halves[0].advance():
                halves.clear()


def split_segments(flat: Tensor, most: int) -> Sequence[Tensor]:
    """``flat`` [n] in segments of at most ``most`` elements."""
    # To split a small message would take longer than to copy it.
    return flat.split(most) if flat.numel() > most else (flat,)
