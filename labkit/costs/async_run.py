"""A predicted run of an asynchronous parameter server: pushes, waiting times and staleness."""

import heapq
import statistics
from dataclasses import dataclass

from labkit.engine.tracing import Span, Trace
from labkit.schedules.staleness import StalenessTracker, Update

_SERVER_S = 0.1


@dataclass(frozen=True)
class AsyncRun:
    """A predicted run of an asynchronous parameter server.

    Attributes:
        trace: ``compute`` and ``wait`` of the workers 1 .. W, ``update`` and ``wait`` of the
            server, rank 0.
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
        computed_s = 0.0
        waited_s = 0.0
        for worker in self.trace.ranks[1:]:
            seconds = self.trace.seconds_by_kind(worker)
            computed_s += seconds["compute"]
            waited_s += seconds.get("wait", 0.0)
        return waited_s / (computed_s + waited_s)


def simulate(
    workers: int,
    *,
    factor: float = 1.0,
    bound: int | None = None,
    duration_s: float = 20.0,
    synchronous: bool = False,
) -> AsyncRun:
    """Predict the first ``duration_s`` seconds of a run with one straggler.

    Worker 1 computes a gradient in ``factor`` seconds, the others in 1. The server takes 0.1 for
    one: receive, update, send parameters; ``bound``: see ``StalenessTracker``. In ``synchronous``
    rounds all workers push, the server sums, all pull.
    """
    computes_s = {worker: 1.0 for worker in range(1, workers + 1)} | {1: factor}
    tracker = StalenessTracker(computes_s, bound)
    spans: list[Span] = []
    updates: list[Update] = []
    arrived_s: dict[int, float] = {}
    coming: list[tuple[float, int]] = []
    now_s = 0.0

    def pull(worker: int) -> None:
        """The worker has waited for its new parameters, and computes the next gradient."""
        if worker in arrived_s:
            spans.append(Span(worker, "wait", arrived_s.pop(worker), now_s, peer=sender))
        heapq.heappush(coming, (now_s + computes_s[worker], worker))
        spans.append(Span(worker, "compute", now_s, now_s + computes_s[worker]))

    for worker in computes_s:
        pull(worker)
    while now_s < duration_s:
        arrival_s, sender = heapq.heappop(coming)
        arrived_s[sender] = arrival_s
        if arrival_s > now_s:
            # For whoever comes first, as in a real run: without a peer.
            spans.append(Span(0, "wait", now_s, arrival_s))
            now_s = arrival_s
        tracker.push(sender)
        while (chosen := tracker.next_worker()) is not None:
            tracker.apply(chosen)
            spans.append(Span(0, "update", now_s, now_s + _SERVER_S))
            now_s += _SERVER_S
            if not synchronous:
                updates += tracker.updates[-1:] * (now_s <= duration_s)
                tracker.pull(chosen)
                pull(chosen)
        if synchronous and not coming:
            updates += [Update(worker, 0) for worker in computes_s if now_s <= duration_s]
            for worker in computes_s:
                pull(worker)
    # Who still waits for the server waits until the end.
    spans += [Span(worker, "wait", since_s, duration_s) for worker, since_s in arrived_s.items()]
    return AsyncRun(Trace.merge([spans]).between(0.0, duration_s), tuple(updates), duration_s)
