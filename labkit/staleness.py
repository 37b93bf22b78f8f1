"""Staleness: by how many updates a gradient is late, and how a server bounds that.

The server's parameters have a version: the number of updates so far. A worker pulls version v,
computes a gradient from it, and pushes it. By then other workers have moved the parameters on to
version V: the update has **staleness** V - v. ``Books`` keeps count of it and holds a push back
where a bound asks for it; the server of ``strategies.async_parameter_server`` and the model below
ask the same object.

Why a bound has to look ahead: worker 1 may be let in only if every other gradient that is under
way can still come in time, in the worst case one after another. It is enough to look at the order
of their age, oldest first: if that one works, the server can always fall back on it.

Symbols: W workers, V the version, v_j the version that worker j has pulled.
Sources: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
server" (2013), the bound; Dijkstra's banker's algorithm (1965), the looking ahead.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from labkit.trace import Span, Trace


class Update(NamedTuple):
    """One gradient that the server has applied: whose, and how many updates too late."""

    worker: int
    staleness: int


class Books:
    """Who has pulled which version, whose push waits, and who may come next.

    All workers start with version 0.

    Attributes:
        version: V, the updates so far.
        updates: each of them.

    Args:
        workers: their ranks.
        bound: the largest staleness to allow, W - 1 or more; None allows any.

    Raises:
        ValueError: no workers, or a bound that W workers cannot keep.
    """

    def __init__(self, workers: Iterable[int], bound: int | None = None):
        self.pulled = dict.fromkeys(workers, 0)
        check_bound(len(self.pulled), bound)
        self.bound = bound
        self.version = 0
        self.updates: list[Update] = []
        # In the order in which they came.
        self.held: list[int] = []

    def push(self, worker: int) -> None:
        """A gradient of ``worker`` has come."""
        self.held.append(worker)

    def next(self) -> int | None:
        """The worker whose push may be applied now; None if none may be yet.

        Of those that wait the one with the oldest version: if it may not, no other may.
        """
        oldest = min(self.held, key=self.pulled.get, default=None)
        return oldest if oldest is not None and self._may_apply(oldest) else None

    def apply(self, worker: int) -> None:
        """The gradient of ``worker`` has become an update."""
        self.held.remove(worker)
        self.updates.append(Update(worker, self.version - self.pulled[worker]))
        self.version += 1

    def pull(self, worker: int) -> None:
        """``worker`` gets the latest parameters, and computes from them next."""
        if worker in self.held:
            self.held.remove(worker)
        self.pulled[worker] = self.version

    def drop(self, worker: int) -> None:
        """Nothing more comes from ``worker``, and nobody has to wait for it."""
        if worker in self.held:
            self.held.remove(worker)
        del self.pulled[worker]

    def _may_apply(self, worker: int) -> bool:
        others = [version for other, version in self.pulled.items() if other != worker]
        return self.bound is None or in_time(others, self.version + 1, self.bound)


def in_time(pulled: Iterable[int], version: int, bound: int) -> bool:
    """Whether gradients from these versions can all still be applied, each within the bound.

    The oldest first: the k-th of them (from 0) meets version V + k, so its staleness is
    V + k - v_k.
    """
    oldest_first = enumerate(sorted(pulled))
    return all(version + place - pulled_at <= bound for place, pulled_at in oldest_first)


def check_bound(workers: int, bound: int | None) -> None:
    """Refuse a bound that cannot be kept.

    Raises:
        ValueError: with the smallest that can.
    """
    if workers < 1:
        raise ValueError("staleness needs workers: start at least one")
    if bound is not None and bound < workers - 1:
        raise ValueError(
            f"a staleness of at most {bound} cannot be kept with {workers} workers: all start "
            f"from version 0, so one of their first updates is {workers - 1} late. Use "
            f"{workers - 1} (every worker once a round) or more, or fewer workers"
        )


@dataclass(frozen=True)
class Timetable:
    """Who would do what when: the model's prediction.

    Attributes:
        spans: ``compute`` and ``wait`` of the workers 1 .. W, ``update`` of the server, rank 0.
        updates: the gradients applied; in synchronous rounds they have staleness 0.
        duration_s: how long the model was watched.
    """

    spans: tuple[Span, ...]
    updates: tuple[Update, ...]
    duration_s: float

    @property
    def trace(self) -> Trace:
        return Trace.merge([self.spans])

    @property
    def gradients_per_s(self) -> float:
        return len(self.updates) / self.duration_s

    def mean_staleness(self) -> float:
        """Over the updates; 0 where there is none."""
        return sum(u.staleness for u in self.updates) / max(1, len(self.updates))

    def waiting_share(self) -> float:
        """The part of the workers' time that they wait, from 0 to 1."""
        workers = [span for span in self.spans if span.rank]
        total_s = sum(span.duration_s for span in workers)
        return sum(span.duration_s for span in workers if span.kind == "wait") / total_s


def simulate(
    workers: int,
    *,
    factor: float = 1.0,
    bound: int | None = None,
    duration_s: float = 20.0,
    compute_s: float = 1.0,
    server_s: float = 0.1,
    synchronous: bool = False,
) -> Timetable:
    """A parameter server on paper.

    Args:
        workers: W; worker 1 is the straggler.
        factor: the straggler computes this many times as long.
        bound: the largest staleness, see ``Books``; None allows any.
        duration_s: how long to watch.
        compute_s: a gradient's time on a worker that does not straggle.
        server_s: the server's time for a gradient: receive it, update, send parameters back.
        synchronous: instead, all push, the server adds up, all pull: one round after another.

    Raises:
        ValueError: impossible numbers.
    """
    if not (factor >= 1 and compute_s > 0 and server_s >= 0 and duration_s > 0):
        raise ValueError(
            f"times must be above 0 and the factor 1 or more, got factor {factor}, compute_s "
            f"{compute_s}, server_s {server_s}, duration_s {duration_s}"
        )
    check_bound(workers, bound)
    computes_s = {w: compute_s * (factor if w == 1 else 1.0) for w in range(1, workers + 1)}
    if synchronous:
        spans, ends = _rounds(computes_s, server_s, duration_s)
    else:
        spans, ends = _own_pace(computes_s, server_s, duration_s, bound)
    updates = tuple(update for end_s, update in ends if end_s <= duration_s)
    return Timetable(_until(spans, duration_s), updates, duration_s)


def _own_pace(computes_s: dict[int, float], server_s: float, until_s: float, bound: int | None):
    """Spans, and (second of its end, update) of each: pushes are served as they come."""
    books = Books(computes_s, bound)
    spans, ends, arrived_s, now_s = [], [], {}, 0.0
    coming = [(seconds, worker) for worker, seconds in computes_s.items()]
    heapq.heapify(coming)
    spans += [Span(worker, "compute", 0.0, seconds) for seconds, worker in coming]
    while now_s < until_s:
        time_s, worker = heapq.heappop(coming)
        books.push(worker)
        arrived_s[worker] = time_s
        now_s = max(now_s, time_s)
        while (worker := books.next()) is not None:
            books.apply(worker)
            spans.append(Span(0, "update", now_s, now_s + server_s))
            now_s += server_s
            ends.append((now_s, books.updates[-1]))
            books.pull(worker)
            spans.append(Span(worker, "wait", arrived_s[worker], now_s))
            spans.append(Span(worker, "compute", now_s, now_s + computes_s[worker]))
            heapq.heappush(coming, (now_s + computes_s[worker], worker))
    # Whose push is held when time is up waits to the end.
    spans += [Span(worker, "wait", arrived_s[worker], until_s) for worker in books.held]
    return spans, ends


def _rounds(computes_s: dict[int, float], server_s: float, until_s: float):
    """The same, in step: a round ends when the last has been served."""
    spans, ends, start_s = [], [], 0.0
    while start_s < until_s:
        now_s = start_s
        for worker in sorted(computes_s, key=computes_s.get):
            arrived_s = start_s + computes_s[worker]
            now_s = max(now_s, arrived_s)
            spans.append(Span(0, "update", now_s, now_s + server_s))
            now_s += server_s
        for worker, seconds in computes_s.items():
            spans.append(Span(worker, "compute", start_s, start_s + seconds))
            spans.append(Span(worker, "wait", start_s + seconds, now_s))
            ends.append((now_s, Update(worker, 0)))
        start_s = now_s
    return spans, ends


def _until(spans: Iterable[Span], until_s: float) -> tuple[Span, ...]:
    cut = [
        Span(s.rank, s.kind, s.start_s, min(s.end_s, until_s))
        for s in spans
        if s.start_s < until_s
    ]
    return tuple(span for span in cut if span.duration_s > 0)
