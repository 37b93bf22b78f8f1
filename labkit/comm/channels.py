"""Channels through shared memory, and the doorbell of a rank that waits for any sender.

The sender copies a segment of its tensor into a free slot; the receiver reads it there, or adds
straight out of it, and the slot is free again. A segment is small enough to stay in the cache from
the copy to the reduction.
"""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labkit.comm.board import LEFT, LOST, Board
from labkit.comm.processes import is_running
from labkit.comm.shared_memory import NUM_SLOTS, SEGMENT_BYTES, Arena, Semaphore
from labkit.comm.transports import Sent
from labkit.errors import PeerLostError

# How often a sleeping rank looks whether its peer is still alive.
LOOK_S = 0.1


class Doorbells:
    """How a rank sleeps until any other has something to send to it.

    Who sends posts it on the board, then rings; who waits looks at the board, then sleeps until it
    rings. Rings nobody has waited for add up, and at worst let a later sleeper look in vain.

    Args:
        arena: of this machine's ranks, with semaphores.
        rank: whose bell ``wait`` listens to.
        timeout_s: the longest wait for a message.
    """

    def __init__(self, arena: Arena, rank: int, timeout_s: float = float("inf")):
        self._board = arena.board
        self._bells = [arena.doorbell(other) for other in range(arena.world_size)]
        self._rank = rank
        self._timeout_s = timeout_s
        self._looked_s = time.monotonic()

    def ring(self, rank: int) -> None:
        self._bells[rank].post()

    def wait_for_sender(self, sources: list[int]) -> int:
        """The source whose message has waited longest; sleeps until there is one.

        Raises:
            PeerLostError: a source has ended without one, or none came in ``timeout_s``.
        """
        started_s = time.monotonic()
        while True:
            source = self._board.first_sender(self._rank, sources)
            now_s = time.monotonic()
            # Even if others keep coming: one that has ended must not go unnoticed till the end.
            if now_s - self._looked_s > LOOK_S:
                self._looked_s = now_s
                self._look_for_losses(sources, now_s - started_s)
            if source is not None:
                return source
            self._bells[self._rank].wait(LOOK_S)

    def _look_for_losses(self, sources: list[int], waited_s: float) -> None:
        for source in sources:
            lost = self._board.gave_up() or why_gone(self._board, source)
            # What it posted before its end counts: then the transfer finds out.
            if lost and self._board.first_sender(self._rank, [source]) is None:
                raise PeerLostError(lost, rank=source)
        if waited_s > self._timeout_s:
            raise PeerLostError(f"nothing from ranks {sources} in {self._timeout_s:g} s")


class Channel:
    """One edge, as one of its two ends sees it: the sender fills slots, the receiver empties them.

    ``reserve`` and ``commit`` are the sender's, ``arrive`` and ``release`` the receiver's. Between
    the two calls the slot belongs to the caller.

    Args:
        arena: of this machine's ranks.
        source, destination: the edge.
        wait: sleep until a semaphore can be taken, or its peer is lost: ``wait(semaphore, peer)``.
        sent: counts what the sender sends; None at the receiving end, which counts nothing.
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
        self._peer = source if sent is None else destination
        self._wait = wait
        self._slots = arena.slots(source, destination)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._next = 0
        self._sent = sent or Sent()
        self._slot_bytes = 0

    def reserve(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The next free slot, as a tensor [num_elements] of ``dtype``; may wait."""
        self._wait(self.free, self._peer)
        return self.writable(num_elements, dtype)

    def commit(self, begins_message: bool = True) -> None:
        """The slot holds its segment, the first of a message or a later one: it is sent."""
        self._sent.count(self._slot_bytes, begins_message)
        self._next = (self._next + 1) % NUM_SLOTS
        self.filled.post()

    def arrive(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The next filled slot, in the same terms; may wait."""
        self._wait(self.filled, self._peer)
        return self.readable(num_elements, dtype)

    def release(self) -> None:
        """The slot is read: the sender may have it back."""
        self._next = (self._next + 1) % NUM_SLOTS
        self.free.post()

    def opening(self) -> Iterator[Semaphore]:
        """What the receiver needs before its first segment: nothing, the arena is there."""
        return iter(())

    def writable(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The slot, for a sender who has taken ``free``."""
        return self.slot(num_elements, dtype)

    def readable(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The slot, for a receiver who has taken ``filled``."""
        return self.slot(num_elements, dtype)

    def slot(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        self._slot_bytes = num_elements * dtype.itemsize
        key = self._next, num_elements, dtype
        if key not in self._views:
            if len(self._views) > 64:
                self._views.clear()
            self._views[key] = self._slots[self._next].view(dtype)[:num_elements]
        return self._views[key]


def why_gone(board: Board, peer: int) -> str:
    """Why nothing more will come from ``peer``; empty while it may."""
    pid, state = int(board.ranks[peer]["pid"]), int(board.ranks[peer]["state"])
    if state == LEFT:
        return f"rank {peer} has left: its process group is destroyed, or it is at its end"
    if state == LOST or (pid and not is_running(pid)):
        return f"the process of rank {peer} (pid {pid}) has ended"
    return ""
