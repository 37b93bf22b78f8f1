"""A predicted run of an asynchronous parameter server: pushes, waiting times and staleness."""

import heapq
import statistics
from dataclasses import dataclass

from labkit.schedules.servers import StalenessTracker, Update
from labkit.tracing import Span, Trace


@dataclass(frozen=True)
class AsyncRun:
    """A predicted run of an asynchronous parameter server.

    Attributes:
        trace: ``compute`` and ``wait`` of the workers 1 .. W, ``update`` of the server, rank 0.
        updates: the gradients applied; in synchronous rounds they have staleness 0.
        duration_s: seconds of the run that were simulated.
    """

    trace: Trace
    updates: tuple[Update, ...]
    duration_s: float

    def mean_staleness(self) -> float:
        return statistics.fmean(update.staleness for update in self.updates)

    def waiting_share(self) -> float:
        """The share of their time that the workers spend waiting, 0 to 1."""
        seconds = self.trace.seconds_by_kind()
        return seconds.get("wait", 0.0) / (seconds["compute"] + seconds.get("wait", 0.0))


def simulate(
    workers: int,
    *,
    factor: float = 1.0,
    bound: int | None = None,
    duration_s: float = 20.0,
    server_s: float = 0.1,
    synchronous: bool = False,
) -> AsyncRun:
    """Predict the first ``duration_s`` seconds of a run with one straggler.

    The server handles one push at a time.

    Args:
        workers: W; worker 1 is the straggler.
        factor: the straggler's seconds per gradient; the others take 1.
        bound: the largest staleness, see ``StalenessTracker``; None allows any.
        duration_s: seconds to simulate.
        server_s: seconds that the server takes per gradient: receive, update, send parameters.
        synchronous: simulate synchronous rounds instead: all workers push, the server sums, all
            pull.
    """
    if factor < 1:
        raise ValueError(f"a straggler computes at least as long as the others, got {factor}")
    computes_s = {w: factor if w == 1 else 1.0 for w in range(1, workers + 1)}
    tracker = StalenessTracker(computes_s, bound)
    spans, updates = _played(computes_s, server_s, duration_s, None if synchronous else tracker)
    trace = Trace.merge([spans]).between(0.0, duration_s)
    return AsyncRun(trace, tuple(updates), duration_s)


def _played(
    computes_s: dict[int, float],
    server_s: float,
    until_s: float,
    tracker: StalenessTracker | None,
) -> tuple[list[Span], list[Update]]:
    """The spans and updates of a run; the tracker chooses the next push, None plays rounds."""
    spans: list[Span] = []
    updates: list[Update] = []
    arrived_s: dict[int, float] = {}
    coming: list[tuple[float, int]] = []

    def pull(worker: int, now_s: float) -> None:
        """The worker has waited for its new parameters, and computes the next gradient."""
        if worker in arrived_s:
            spans.append(Span(worker, "wait", arrived_s[worker], now_s))
        heapq.heappush(coming, (now_s + computes_s[worker], worker))
        spans.append(Span(worker, "compute", now_s, now_s + computes_s[worker]))

    def handle(now_s: float) -> float:
        spans.append(Span(0, "update", now_s, now_s + server_s))
        return now_s + server_s

    for worker in computes_s:
        pull(worker, 0.0)
    now_s = 0.0
    while now_s < until_s:
        arrival_s, sender = heapq.heappop(coming)
        arrived_s[sender] = arrival_s
        now_s = max(now_s, arrival_s)
        if tracker is None:
            now_s = handle(now_s)
            for worker in () if coming else computes_s:
                updates += [Update(worker, 0)] * (now_s <= until_s)
                pull(worker, now_s)
            continue
        tracker.push(sender)
        while (chosen := tracker.next()) is not None:
            tracker.apply(chosen)
            now_s = handle(now_s)
            updates += [tracker.updates[-1]] * (now_s <= until_s)
            tracker.pull(chosen)
            pull(chosen, now_s)
    # Who still waits for the server waits until the end.
    computing = {worker for _, worker in coming}
    spans += [Span(w, "wait", arrived_s[w], until_s) for w in computes_s if w not in computing]
    return spans, updates
