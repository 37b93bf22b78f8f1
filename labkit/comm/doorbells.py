"""Doorbells: how a rank sleeps until any other has something to send to it."""

import time

from labkit.comm.shared_memory import Arena
from labkit.comm.waiting import LOOK_S, why_gone
from labkit.errors import PeerLostError


class Doorbells:
    """One bell per rank of a machine, and the wait for this rank's.

    A sender posts its message on the board, then rings; the receiver looks at the board, then
    sleeps until its bell rings. Rings that nobody has waited for add up: at worst a later sleeper
    wakes up and looks in vain.

    Args:
        arena: of this machine's ranks, with semaphores.
        rank: the one whose bell ``wait_for_sender`` listens to.
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
            # Even while others keep coming: a source that has ended must not go unnoticed.
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
