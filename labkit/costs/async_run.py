"""A run of an asynchronous parameter server on paper: who pushes when, and how stale it is."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.schedules.staleness import StalenessTracker, Update, check_bound
from labkit.trace import Span, Trace


@dataclass(frozen=True)
class AsyncRun:
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
) -> AsyncRun:
    """A parameter server on paper.

    Args:
        workers: W; worker 1 is the straggler.
        factor: the straggler computes this many times as long.
        bound: the largest staleness, see ``StalenessTracker``; None allows any.
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
    return AsyncRun(_until(spans, duration_s), updates, duration_s)


def _own_pace(computes_s: dict[int, float], server_s: float, until_s: float, bound: int | None):
    """Spans, and (second of its end, update) of each: pushes are served as they come."""
    tracker = StalenessTracker(computes_s, bound)
    spans, ends, arrived_s, now_s = [], [], {}, 0.0
    coming = [(seconds, worker) for worker, seconds in computes_s.items()]
    heapq.heapify(coming)
    spans += [Span(worker, "compute", 0.0, seconds) for seconds, worker in coming]
    while now_s < until_s:
        time_s, worker = heapq.heappop(coming)
        tracker.push(worker)
        arrived_s[worker] = time_s
        now_s = max(now_s, time_s)
        while (worker := tracker.next()) is not None:
            tracker.apply(worker)
            spans.append(Span(0, "update", now_s, now_s + server_s))
            now_s += server_s
            ends.append((now_s, tracker.updates[-1]))
            tracker.pull(worker)
            spans.append(Span(worker, "wait", arrived_s[worker], now_s))
            spans.append(Span(worker, "compute", now_s, now_s + computes_s[worker]))
            heapq.heappush(coming, (now_s + computes_s[worker], worker))
    # Whose push is held when time is up waits to the end.
    spans += [Span(worker, "wait", arrived_s[worker], until_s) for worker in tracker.held]
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
