"""Staleness: how many updates late a gradient is, and how a server bounds that.

The server's parameters have a version: the number of updates so far. A worker pulls version v,
computes a gradient from it, and pushes it. By then other workers have moved the parameters on to
version V: the update has **staleness** V - v. ``StalenessTracker`` counts it and holds a push back
where a bound requires that. The server (``strategies.async_parameter_server``) and the model of a
run (``costs.async_run``) use the same class.

Why a bound needs to look ahead: a push may be applied only if, after it, the gradients of all the
other workers can still be applied within the bound, in the worst case one after another. It is
enough to check one order, oldest version first: the server can always use that order.

Symbols: W workers, V the version, v_j the version that worker j has pulled.
Sources: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
server" (2013), for the bound; Dijkstra's banker's algorithm (1965), for looking ahead.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Update(NamedTuple):
    """One gradient that the server has applied: from which worker, and how many updates late."""

    worker: int
    staleness: int


class StalenessTracker:
    """Which worker has pulled which version, which pushes wait, and which may be applied next.

    All workers start with version 0.

    Attributes:
        version: V, the number of updates so far.
        updates: all updates so far, in order.
        pulled: {worker: v_j}.
        held: the workers with a waiting push, in the order in which they pushed.

    Args:
        workers: their ranks.
        bound: the largest staleness allowed, W - 1 or more; None allows any.

    Raises:
        ValueError: no workers, or a bound that W workers cannot keep.
    """

    def __init__(self, workers: Iterable[int], bound: int | None = None):
        self.pulled = dict.fromkeys(workers, 0)
        check_bound(len(self.pulled), bound)
        self.bound = bound
        self.version = 0
        self.updates: list[Update] = []
        self.held: list[int] = []

    def push(self, worker: int) -> None:
        """Record that a gradient of ``worker`` has arrived."""
        self.held.append(worker)

    def next(self) -> int | None:
        """The worker whose push may be applied now; None if none may be.

        It is the waiting worker with the oldest version: if that one has to wait, all have to.
        """
        oldest = min(self.held, key=self.pulled.__getitem__, default=None)
        if oldest is None or self.bound is None:
            return oldest
        others = [version for worker, version in self.pulled.items() if worker != oldest]
        return oldest if in_time(others, self.version + 1, self.bound) else None

    def apply(self, worker: int) -> None:
        """Record that the gradient of ``worker`` has become an update."""
        self.held.remove(worker)
        self.updates.append(Update(worker, self.version - self.pulled[worker]))
        self.version += 1

    def pull(self, worker: int) -> None:
        """Record that ``worker`` has pulled the latest parameters for its next gradient."""
        if worker in self.held:
            self.held.remove(worker)
        self.pulled[worker] = self.version

    def go_on_from(self, updates: Iterable[Sequence[int]]) -> None:
        """Continue after these updates; all workers have the parameters that they have made."""
        self.updates[:] = [Update(*update) for update in updates]
        self.version = len(self.updates)
        self.pulled = dict.fromkeys(self.pulled, self.version)

    def drop(self, worker: int) -> None:
        """Forget ``worker``: no more gradients come from it, and no other worker waits for it."""
        if worker in self.held:
            self.held.remove(worker)
        del self.pulled[worker]


def in_time(pulled: Iterable[int], version: int, bound: int) -> bool:
    """Whether gradients from the ``pulled`` versions can all still be applied within the bound.

    Applied oldest first, the k-th of them (from 0) meets version V + k: its staleness is
    V + k - v_k.
    """
    oldest_first = enumerate(sorted(pulled))
    return all(version + place - pulled_at <= bound for place, pulled_at in oldest_first)


def check_bound(workers: int, bound: int | None) -> None:
    """Refuse a bound that cannot be kept.

    Raises:
        ValueError: the message names the smallest bound that can.
    """
    if workers < 1:
        raise ValueError("staleness needs workers: start at least one")
    if bound is not None and bound < workers - 1:
        raise ValueError(
            f"a staleness of at most {bound} cannot be kept with {workers} workers: all start "
            f"from version 0, so one of their first gradients is {workers - 1} updates late. Use "
            f"{workers - 1} (every worker once per round) or more, or fewer workers"
        )
