"""A predicted run of an asynchronous parameter server: pushes, waiting times and staleness."""

import heapq
from dataclasses import dataclass

from labkit.schedules.staleness import StalenessTracker, Update, check_bound
from labkit.tracing import Span, Trace

# Spans, and updates with the second at which the server has made them.
_Events = tuple[list[Span], list[tuple[float, Update]]]


@dataclass(frozen=True)
class AsyncRun:
    """A predicted run of an asynchronous parameter server.

    Attributes:
        spans: ``compute`` and ``wait`` of the workers 1 .. W, ``update`` of the server, rank 0.
        updates: the gradients applied; in synchronous rounds they have staleness 0.
        duration_s: seconds of the run that were simulated.
    """

    spans: tuple[Span, ...]
    updates: tuple[Update, ...]
    duration_s: float

    @property
    def trace(self) -> Trace:
        return Trace.merge([self.spans])

    def mean_staleness(self) -> float:
        """The mean staleness of the updates; 0 without updates."""
        return sum(u.staleness for u in self.updates) / max(1, len(self.updates))

    def waiting_share(self) -> float:
        """The share of their time that the workers spend waiting, 0 to 1."""
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
    """Predict the first ``duration_s`` seconds of a run with one straggler.

    Args:
        workers: W; worker 1 is the straggler.
        factor: how many times as long the straggler computes.
        bound: the largest staleness, see ``StalenessTracker``; None allows any.
        duration_s: seconds to simulate.
        compute_s: seconds per gradient on the other workers.
        server_s: seconds that the server takes per gradient: receive, update, send parameters.
        synchronous: simulate synchronous rounds instead: all workers push, the server sums, all
            pull.

    Raises:
        ValueError: a time or factor out of range, or a bound that cannot be kept.
    """
    if not (factor >= 1 and compute_s > 0 and server_s >= 0 and duration_s > 0):
        raise ValueError(
            f"compute_s and duration_s must be above 0, server_s 0 or more and the factor 1 or "
            f"more, got factor {factor}, compute_s {compute_s}, server_s {server_s}, duration_s "
            f"{duration_s}"
        )
    check_bound(workers, bound)
    computes_s = {w: compute_s * (factor if w == 1 else 1.0) for w in range(1, workers + 1)}
    if synchronous:
        spans, ends = _in_rounds(computes_s, server_s, duration_s)
    else:
        spans, ends = _one_by_one(computes_s, server_s, duration_s, bound)
    updates = tuple(update for end_s, update in ends if end_s <= duration_s)
    # Nothing is shown after the end, and nothing empty.
    cut = [(s.rank, s.kind, s.start_s, min(s.end_s, duration_s)) for s in spans]
    shown = tuple(Span(*span) for span in cut if span[2] < span[3])
    return AsyncRun(shown, updates, duration_s)


def _in_rounds(computes_s: dict[int, float], server_s: float, until_s: float) -> _Events:
    """A round ends for all workers when the server has handled the last push."""
    spans, ends, start_s = [], [], 0.0
    while start_s < until_s:
        now_s = start_s
        for seconds in sorted(computes_s.values()):
            now_s = max(now_s, start_s + seconds)
            spans.append(Span(0, "update", now_s, now_s + server_s))
            now_s += server_s
        for worker, seconds in computes_s.items():
            spans.append(Span(worker, "compute", start_s, start_s + seconds))
            spans.append(Span(worker, "wait", start_s + seconds, now_s))
            ends.append((now_s, Update(worker, 0)))
        start_s = now_s
    return spans, ends


def _one_by_one(
    computes_s: dict[int, float], server_s: float, until_s: float, bound: int | None
) -> _Events:
    """The server handles one push at a time; the tracker chooses the next one."""
    tracker = StalenessTracker(computes_s, bound)
    spans, ends, arrived_s, now_s = [], [], {}, 0.0
    coming = [(seconds, worker) for worker, seconds in computes_s.items()]
    heapq.heapify(coming)
    spans += [Span(worker, "compute", 0.0, seconds) for seconds, worker in coming]
    while now_s < until_s:
        time_s, sender = heapq.heappop(coming)
        tracker.push(sender)
        arrived_s[sender] = time_s
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
    # A worker whose push is still held waits until the end.
    spans += [Span(worker, "wait", arrived_s[worker], until_s) for worker in tracker.held]
    return spans, ends
