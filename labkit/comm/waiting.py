"""Waiting for another rank in shared memory: spin, then sleep, and notice a lost peer.

Waking a sleeping process takes about as long as sending a small message. So a rank first spins for
a short while: it checks the semaphore again and again, and yields its core between two checks,
since the peer may need the core. Then it sleeps on the semaphore, and wakes up ten times per
second to check whether the peer's process still runs.

Where more processes want to run than there are cores, a yielded core comes back only after
milliseconds, while a process that is woken gets one at once. Then a rank sleeps without spinning.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from labkit.comm.board import LEFT, LOST, Board
from labkit.comm.deadlock import uneven_collectives
from labkit.comm.processes import is_running
from labkit.comm.shared_memory import Semaphore
from labkit.errors import PeerLostError

# The interval at which a sleeping rank checks whether its peer is still alive.
LOOK_S = 0.1

_SPIN_S = 200e-6
# A yield that takes longer than this has given the core to a process that had work to do. The
# rank then does not yield for so many times as long: it loses a small share of its time at most.
_LONG_YIELD_S = 0.5e-3
_NO_YIELD_FOR = 10

# A process cannot sleep on two semaphores at once, so it sleeps on each in turn. The turns grow
# with the time waited, so that a long wait does not keep a core busy.
_TURN_S = 0.3e-3
_LONGEST_TURN_S = 10e-3


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
        """Wait until ``peer`` has posted the semaphore, and decrement it.

        Raises:
            PeerLostError: the peer's process has ended, or did not post within ``timeout_s``.
        """
        if semaphore.try_wait():
            return
        started_s = now_s = time.monotonic()
        while self._spins(started_s, now_s):
            if semaphore.try_wait():
                return
            now_s = self._yield_core(now_s)
        while not semaphore.wait(LOOK_S):
            if self._came_after_all(semaphore, peer, time.monotonic() - started_s):
                return

    def wait_for_first(self, needs: Sequence[tuple[Semaphore, int]]) -> int:
        """Wait for the first of several (semaphore, peer), decrement it, and return its index.

        Raises the errors of ``wait``, for any of the peers.
        """
        started_s = looked_s = now_s = time.monotonic()
        while True:
            waited_s, spins = now_s - started_s, self._spins(started_s, now_s)
            turn_s = min(max(_TURN_S, waited_s / 100), _LONGEST_TURN_S)
            for index, (semaphore, _) in enumerate(needs):
                if semaphore.try_wait() or (not spins and semaphore.wait(turn_s)):
                    return index
            now_s = self._yield_core(now_s) if spins else time.monotonic()
            if now_s - looked_s > LOOK_S:
                looked_s = now_s
                for index, (semaphore, peer) in enumerate(needs):
                    if self._came_after_all(semaphore, peer, waited_s):
                        return index

    def _spins(self, started_s: float, now_s: float) -> bool:
        return now_s - started_s < _SPIN_S and now_s >= self._spins_from_s

    def _yield_core(self, now_s: float) -> float:
        """Let another process run on this core; return the time after that."""
        os.sched_yield()
        after_s = time.monotonic()
        if after_s - now_s > _LONG_YIELD_S:
            self._spins_from_s = after_s + _NO_YIELD_FOR * (after_s - now_s)
        return after_s

    def _came_after_all(self, semaphore: Semaphore, peer: int, waited_s: float) -> bool:
        """False while ``peer`` may still post; True if it did so just before its end.

        Raises:
            PeerLostError: the peer is lost, or the wait has timed out or was abandoned.
        """
        lost = "this rank is ending" if self.abandoned else why_gone(self._board, peer)
        if not lost and waited_s > self.timeout_s:
            lost = f"nothing from rank {peer} in {self.timeout_s:g} s"
        if not lost:
            return False
        # A post that the peer made before its end still counts.
        if semaphore.try_wait():
            return True
        raise PeerLostError(lost + uneven_collectives(self._board, self._rank, peer), rank=peer)


def why_gone(board: Board, peer: int) -> str:
    """Why ``peer`` will send nothing more; empty while it may still send."""
    if why := board.gave_up():
        return why
    pid, state = int(board.ranks[peer]["pid"]), int(board.ranks[peer]["state"])
    if state == LEFT:
        return f"rank {peer} has left: its process group was destroyed, or its program has ended"
    # The board of another host does not say the process id.
    if state == LOST or (pid and not is_running(pid)):
        return f"the process of rank {peer}{f' (pid {pid})' if pid else ''} has ended"
    return ""


class Bell:
    """A doorbell that only threads of this process ring."""

    def __init__(self):
        self._rings = threading.Semaphore(0)

    def post(self) -> None:
        self._rings.release()

    def wait(self, timeout_s: float) -> bool:
        return self._rings.acquire(timeout=timeout_s)


class Doorbells:
    """The doorbells of the ranks that share a board, one each, and the wait for this rank's.

    A sender posts its message on the board, then rings; the receiver looks at the board, then
    sleeps until its bell rings. Rings that no rank has waited for add up: at worst, a later wait
    wakes up early and finds no message. For messages of any other rank, the transport rings.

    Args:
        bells: of the ranks that share ``board``, by rank; this rank's own among them.
    """

    def __init__(
        self, board: Board, rank: int, timeout_s: float, bells: Mapping[int, Semaphore | Bell]
    ):
        self._board, self._bells = board, bells
        self._rank = rank
        self._timeout_s = timeout_s
        self._looked_s = time.monotonic()

    def has(self, rank: int) -> bool:
        """Whether ``rank`` shares the board."""
        return rank in self._bells

    def ring(self, rank: int) -> None:
        if rank in self._bells:
            self._bells[rank].post()

    def ring_mine(self) -> None:
        self._bells[self._rank].post()

    def wait_for_sender(
        self, sources: list[int], arrived: Callable[[], Mapping[int, float]] = dict
    ) -> int:
        """The source whose message has waited longest; sleeps until there is one.

        Args:
            arrived: the sources that share no board with this rank and have come, and when.

        Raises:
            PeerLostError: a source has ended without a message, or none came in ``timeout_s``.
        """
        started_s = time.monotonic()
        near = [source for source in sources if source in self._bells]
        while True:
            since_s = {**self._board.senders(self._rank, near), **arrived()}
            now_s = time.monotonic()
            # Also while messages keep coming, so that a source that has ended is noticed.
            if now_s - self._looked_s > LOOK_S:
                self._looked_s = now_s
                self._look_for_losses(sources, since_s, now_s - started_s)
            if since_s:
                return min(since_s, key=since_s.__getitem__)
            self._bells[self._rank].wait(LOOK_S)

    def _look_for_losses(
        self, sources: list[int], came: Mapping[int, float], waited_s: float
    ) -> None:
        for source in sources:
            lost = why_gone(self._board, source)
            # A message posted before its end may still arrive; if not, the transfer fails.
            if lost and source not in came and source not in self._near_senders(source):
                raise PeerLostError(lost, rank=source)
        if waited_s > self._timeout_s:
            raise PeerLostError(f"nothing from ranks {sources} in {self._timeout_s:g} s")

    def _near_senders(self, source: int) -> Mapping[int, float]:
        return self._board.senders(self._rank, [source]) if source in self._bells else {}
