"""Point-to-point messages through shared memory: the fast way between ranks of one machine."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.comm.channels import LOOK_S, Channel, why_gone
from labkit.comm.shared_memory import Arena, Semaphore
from labkit.comm.transports import Transport, as_bytes
from labkit.errors import PeerLostError

# How long a rank looks again and again before it sleeps: waking up takes about as long. Between
# looks it offers its core to others, since the peer may be waiting for that very core.
_SPIN_S = 200e-6


# With two sides of an exchange open, neither may be waited for to the end: they take turns, which
# grow with the time waited, so that a long wait does not keep a core busy.
_TURN_S = 0.3e-3


_LONGEST_TURN_S = 10e-3


@dataclass
class _Side:
    """One half of an exchange under way: ``steps`` yields each semaphore it needs to go on."""

    peer: int
    steps: Iterator[Semaphore]
    needs: Semaphore | None = None

    def go_on(self) -> None:
        self.needs = next(self.steps, None)


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
        self.timeout_s = timeout_s
        self._channels: dict[tuple[int, int], Channel] = {}
        self._abandoned = False
        arena.board.ranks[rank]["pid"] = os.getpid()

    def send(self, tensor: Tensor, dst: int) -> None:
        self._drive([_Side(dst, self._sending(tensor, dst))])

    def recv(self, tensor: Tensor, src: int) -> None:
        self._drive([_Side(src, self._receiving(tensor, src))])

    def recv_add(self, tensor: Tensor, src: int) -> None:
        self._drive([_Side(src, self._adding(tensor, src))])

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        incoming = _Side(src, self._receiving(recv, src))
        self._drive([_Side(dst, self._sending(send, dst)), incoming])

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
            self.wait(met_left, left)
            distance *= 2

    def channel_to(self, dst: int) -> Channel:
        return self._channel(self.rank, dst)

    def channel_from(self, src: int) -> Channel:
        return self._channel(src, self.rank)

    def _channel(self, source: int, destination: int) -> Channel:
        edge = source, destination
        if edge not in self._channels:
            sent = self.sent.to[destination] if self.rank == source else None
            self._channels[edge] = self._new_channel(self.arena, *edge, self.wait, sent)
        return self._channels[edge]

    def _new_channel(self, *edge) -> Channel:
        return Channel(*edge)

    def close(self) -> None:
        self._channels.clear()

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def abandon(self) -> None:
        self._abandoned = True

    def _sending(self, tensor: Tensor, dst: int) -> Iterator[Semaphore]:
        channel = self.channel_to(dst)
        yield channel.ready
        begins_message = True
        for segment in _segments(as_bytes(tensor), channel.segment_bytes):
            yield channel.free
            channel.writable(segment.numel(), torch.uint8).copy_(segment)
            channel.commit(begins_message)
            begins_message = False

    def _receiving(self, tensor: Tensor, src: int) -> Iterator[Semaphore]:
        channel = self.channel_from(src)
        channel.ready.post()
        yield from channel.opening()
        for segment in _segments(as_bytes(tensor), channel.segment_bytes):
            yield channel.filled
            segment.copy_(channel.readable(segment.numel(), torch.uint8))
            channel.release()

    def _adding(self, tensor: Tensor, src: int) -> Iterator[Semaphore]:
        channel = self.channel_from(src)
        channel.ready.post()
        yield from channel.opening()
        for segment in _segments(tensor.view(-1), channel.segment_bytes // tensor.itemsize):
            yield channel.filled
            segment += channel.readable(segment.numel(), segment.dtype)
            channel.release()

    def _drive(self, sides: list[_Side]) -> None:
        """Let every side go on whenever it can, until all have ended."""
        for side in sides:
            side.go_on()
        sides = [side for side in sides if side.needs]
        while len(sides) > 1:
            able = [side for side in sides if side.needs.try_wait()]
            if not able:
                able = [self._first_able(sides)]
            for side in able:
                side.go_on()
            sides = [side for side in sides if side.needs]
        for side in sides:
            while side.needs:
                self.wait(side.needs, side.peer)
                side.go_on()

    def _first_able(self, sides: list[_Side]) -> _Side:
        started_s = looked_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            waited_s = now_s - started_s
            turn_s = min(max(_TURN_S, waited_s / 100), _LONGEST_TURN_S)
            for side in sides:
                if side.needs.try_wait():
                    return side
                if waited_s > _SPIN_S and side.needs.wait(turn_s):
                    return side
            os.sched_yield()
            if now_s - looked_s > LOOK_S:
                looked_s = now_s
                for side in sides:
                    if self._came_after_all(side.needs, side.peer, waited_s):
                        return side

    def wait(self, semaphore: Semaphore, peer: int) -> None:
        """Take one from a semaphore that ``peer`` posts.

        Raises:
            PeerLostError: the peer's process has ended, or nothing came in ``timeout_s``.
        """
        if semaphore.try_wait():
            return
        started_s = time.monotonic()
        while time.monotonic() - started_s < _SPIN_S:
            if semaphore.try_wait():
                return
            os.sched_yield()
        while not semaphore.wait(LOOK_S):
            if self._came_after_all(semaphore, peer, time.monotonic() - started_s):
                return

    def _came_after_all(self, semaphore: Semaphore, peer: int, waited_s: float) -> bool:
        """False while there is hope; PeerLostError when there is none."""
        lost = self._why_lost(peer, waited_s)
        if not lost:
            return False
        # What the peer sent before its end counts.
        if semaphore.try_wait():
            return True
        raise PeerLostError(lost + self.arena.board.compared(self.rank, peer), rank=peer)

    def _why_lost(self, peer: int, waited_s: float) -> str:
        board = self.arena.board
        if self._abandoned:
            return "this rank is at its end"
        if lost := board.gave_up() or why_gone(board, peer):
            return lost
        if waited_s > self.timeout_s:
            return f"nothing from rank {peer} in {self.timeout_s:g} s"
        return ""


def _segments(flat: Tensor, most: int) -> Sequence[Tensor]:
    """``flat`` [n] in pieces of ``most`` elements or less."""
    # To split a small message would take longer than to copy it.
    return flat.split(most) if flat.numel() > most else (flat,)
