"""The staleness of gradients at a parameter server, and a bound on it.

The version of the server's parameters is the number of updates so far. A worker pulls version v,
computes a gradient from it, and pushes it. By then other workers have moved the parameters on to
version V: the update has staleness V - v. A bound needs to look ahead: a push may be applied only
if, after it, the gradients of all the other workers can still be applied within the bound, one
after another. It is enough to check one order, oldest version first: the server can always use
that order.

Symbols: W workers, V the version, v_j the version that worker j has pulled.
Sources: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
server" (2013), for the bound; Dijkstra's banker's algorithm (1965), for looking ahead.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Update(NamedTuple):
    """A gradient that the server has applied: its worker, and the updates that it missed."""

    worker: int
    staleness: int


class StalenessTracker:
    """The versions that workers have pulled, the pushes that wait, and the next one to apply.

    All workers start with version 0. ``bound`` is the largest staleness allowed, W - 1 or more;
    None allows any.

    Attributes:
        version: V, the number of updates so far.
        updates: all updates so far, in order.
        pulled: {worker: v_j}.
        waiting: the workers whose push waits, in the order in which they pushed.
    """

    def __init__(self, workers: Iterable[int], bound: int | None = None):
        self.pulled = dict.fromkeys(workers, 0)
        check_bound(len(self.pulled), bound)
        self.bound = bound
        self.version = 0
        self.updates: list[Update] = []
        self.waiting: list[int] = []

    def push(self, worker: int) -> None:
        """Record that a gradient of ``worker`` has arrived."""
        self.waiting.append(worker)

    def next_worker(self) -> int | None:
        """The worker whose push may be applied now; None if none may be.

        It is the waiting worker with the oldest version: if that one has to wait, all have to.
        """
        oldest = min(self.waiting, key=self.pulled.__getitem__, default=None)
        if oldest is None or self.bound is None:
            return oldest
        remaining = [version for worker, version in self.pulled.items() if worker != oldest]
        return oldest if can_keep_bound(remaining, self.version + 1, self.bound) else None

    def apply(self, worker: int) -> None:
        """Record that the gradient of ``worker`` has become an update."""
        self.waiting.remove(worker)
        self.updates.append(Update(worker, self.version - self.pulled[worker]))
        self.version += 1

    def pull(self, worker: int) -> None:
        """Record that ``worker`` has pulled the latest parameters for its next gradient."""
        if worker in self.waiting:
            self.waiting.remove(worker)
        self.pulled[worker] = self.version

    def drop(self, worker: int) -> None:
        """Forget ``worker``: no more gradients come from it, and no other worker waits for it."""
        if worker in self.waiting:
            self.waiting.remove(worker)
        del self.pulled[worker]


def can_keep_bound(pulled: Iterable[int], version: int, bound: int) -> bool:
    """Return whether the gradients from all ``pulled`` versions can be applied within the bound.

    Applied oldest first, the k-th of them (from 0) meets version V + k: its staleness is
    V + k - v_k.
    """
    oldest_first = enumerate(sorted(pulled))
    return all(version + k - pulled_version <= bound for k, pulled_version in oldest_first)


def check_bound(workers: int, bound: int | None) -> None:
    """Raise ValueError, with the smallest possible bound, for one that cannot be kept."""
    if bound is not None and bound < workers - 1:
        raise ValueError(
            f"a staleness of at most {bound} cannot be kept with {workers} workers: one of their "
            f"first gradients is {workers - 1} updates late. Use {workers - 1} or more"
        )
