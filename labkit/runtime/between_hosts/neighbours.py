"""The processes of this host's ranks, as one of them sees the others."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from labkit.comm.board import LEFT, Board
from labkit.comm.processes import exit_code, is_running, is_stopped

# A rank that was asked to end (by torchrun, because it ends all ranks) is not the cause.
_ENDING_S = 1.0
_ASKED_TO_END = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}


class Neighbours:
    """The ranks of one host.

    Args:
        rank: this rank.
        board: of this host.
        near: its ranks, with this one.
    """

    def __init__(self, rank: int, board: Board, near: Sequence[int]):
        self._rank, self._slots, self._near = rank, board.ranks, near
        self._ended: dict[int, int | None] = {}
        self._ended_s = 0.0
        # {handle: rank}, readable once the process has ended.
        self._handles: dict[int, int] = {}
        for other in near:
            if other != rank and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):
                    self._handles[os.pidfd_open(self._pid(other))] = other

    def handles(self) -> list[int]:
        """Those of the processes that are not known to have ended."""
        return [handle for handle, rank in self._handles.items() if rank not in self._ended]

    def ended(self) -> dict[int, int | None]:
        """{rank: exit code} of those that have ended before the run has; empty for none.

        Those that were asked to end may not be the cause, and are told a moment later.
        """
        now_s = time.monotonic()
        for rank in self._near:
            if rank not in self._ended and not self._runs(rank) and not self._is_over(rank):
                self._ended[rank] = exit_code(self._pid(rank))
                self._ended_s = self._ended_s or now_s
        asked = set(self._ended.values()) <= _ASKED_TO_END
        return {} if asked and now_s - self._ended_s < _ENDING_S else self._ended

    def have_left(self) -> bool:
        """Whether nobody is left who could still hear of a fault."""
        return all(
            self._is_over(r) or not self._runs(r) or is_stopped(self._pid(r)) for r in self._near
        )

    def is_first(self, *, but: int | None = None, left: bool) -> bool:
        """Whether this is the first rank of its host whose process goes on.

        Args:
            but: a rank that does not count.
            left: whether a rank counts that has left the run.
        """
        for rank in self._near:
            if rank == self._rank:
                return rank != but
            counts = rank != but and (left or not self._is_over(rank))
            if counts and self._runs(rank) and not is_stopped(self._pid(rank)):
                return False
        return False

    def close(self) -> None:
        for handle in self._handles:
            os.close(handle)

    def _pid(self, rank: int) -> int:
        return int(self._slots[rank]["pid"])

    def _runs(self, rank: int) -> bool:
        return is_running(self._pid(rank))

    def _is_over(self, rank: int) -> bool:
        """Whether a rank has ended the run by itself, so that its end means nothing."""
        return int(self._slots[rank]["state"]) == LEFT
