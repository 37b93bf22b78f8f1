"""What each rank did at each moment of a trace: computed, communicated, waited, or none of them.

A rank has several lanes (threads), which may do different things at the same time. It computes
while any lane computes; it communicates where only messages are under way, and waits where it only
waits. So communication that overlaps with computing is hidden, and the seconds of a rank's states
add up to its elapsed time.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from labkit.tracing.spans import LOCAL_KINDS, Span, Trace

COMPUTE, COMMUNICATE, WAIT, EVALUATE = "compute", "communicate", "wait", "evaluate"
# No span: code between the recorded operations.
GAP = "gap"
# Earlier states hide later ones.
_ORDER = (EVALUATE, COMPUTE, COMMUNICATE, WAIT)


@dataclass(frozen=True, slots=True)
class Period:
    """A time in which a rank was in one state; ``peer`` is the rank waited for, if known."""

    start_s: float
    end_s: float
    state: str
    peer: int | None = None
    hides: bool = False


@dataclass
class RankTimes:
    """The seconds of one rank by state, and what they are compared with.

    Attributes:
        seconds: by state; they add up to the time until the rank's last span.
        hidden_s: seconds of communication while the rank computed, which are not in ``seconds``.
        blamed_s: seconds in which other ranks waited for this one, by its state at that time.
        unit_s: seconds of computing per unit of work, which is one step where steps are marked by
            their loading of data, and otherwise the whole run; 0 without any span of computing.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden_s: float = 0.0
    blamed_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unit_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Without evaluation, which is no part of any technique."""
        return sum(s for state, s in self.seconds.items() if state != EVALUATE)


def state_of(kind: str) -> str:
    """The state of a rank during a span of this kind."""
    if kind in (WAIT, EVALUATE):
        return kind
    # To compress is local work, too.
    return COMPUTE if kind in LOCAL_KINDS | {"compress"} else COMMUNICATE


def periods(spans: Iterable[Span], start_s: float) -> Iterator[Period]:
    """One rank's periods from ``start_s`` to its last span, in order, without overlaps."""
    changes: list[tuple[float, int, str, int | None]] = []
    for span in spans:
        state = state_of(span.kind)
        changes += [(span.start_s, 1, state, span.peer), (span.end_s, -1, state, None)]
    changes.sort(key=lambda change: change[:2])
    active = dict.fromkeys(_ORDER, 0)
    peer, now_s = None, start_s
    for at_s, step, state, other in changes:
        if at_s > now_s:
            yield _period(now_s, at_s, active, peer)
            now_s = at_s
        active[state] += step
        if state == WAIT and step > 0:
            peer = other


def _period(start_s: float, end_s: float, active: dict[str, int], peer: int | None) -> Period:
    state = next((one for one in _ORDER if active[one]), GAP)
    hides = state == COMPUTE and active[COMMUNICATE] > 0
    return Period(start_s, end_s, state, peer if state == WAIT else None, hides)


def rank_times(trace: Trace, start_s: float | None = None) -> dict[int, RankTimes]:
    """The times of all ranks, by rank.

    Args:
        trace: of one or more ranks.
        start_s: when all ranks started; None means with the first span.
    """
    starts_s = [span.start_s for span in trace.spans]
    begin_s = min(starts_s, default=0.0) if start_s is None else start_s
    spans_of: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        spans_of[span.rank].append(span)
    by_rank = {rank: list(periods(spans_of[rank], begin_s)) for rank in sorted(spans_of)}
    times = {rank: _sums(by_rank[rank], spans_of[rank]) for rank in by_rank}
    _blame(by_rank, times)
    return times


def _sums(mine: list[Period], spans: list[Span]) -> RankTimes:
    times = RankTimes()
    for period in mine:
        seconds = period.end_s - period.start_s
        times.seconds[period.state] += seconds
        times.hidden_s += seconds if period.hides else 0.0
    times.unit_s = _unit_s(spans)
    return times


def _unit_s(spans: list[Span]) -> float:
    """Median seconds of computing in one unit of work; each loading of data begins a unit."""
    units_s = [0.0]
    for span in spans:
        if span.kind == "data":
            units_s.append(0.0)
        elif span.kind in ("compute", "forward", "backward"):
            units_s[-1] += span.duration_s
    # By the median: the first step takes many times as long as the others.
    return statistics.median([unit_s for unit_s in units_s if unit_s] or [0.0])


def _blame(by_rank: dict[int, list[Period]], times: dict[int, RankTimes]) -> None:
    """Add every second of waiting to the ``blamed_s`` of the rank that was waited for."""
    changes: list[tuple[float, int, Period | None]] = []
    for rank, mine in by_rank.items():
        changes += [(period.start_s, rank, period) for period in mine]
        # A rank whose trace has ended is not waited for.
        changes += [(period.end_s, rank, None) for period in mine[-1:]]
    changes.sort(key=lambda change: change[:2])
    current: dict[int, Period] = {}
    for (now_s, rank, period), (until_s, _, _) in pairwise(changes):
        if period is None:
            del current[rank]
        else:
            current[rank] = period
        for waiting in [one for one, its in current.items() if its.state == WAIT]:
            culprits = _culprits(waiting, current) if until_s > now_s else []
            for culprit in culprits:
                its = current[culprit].state
                times[culprit].blamed_s[its] += (until_s - now_s) / len(culprits)


def _culprits(waiting: int, current: dict[int, Period]) -> list[int]:
    """The ranks that a rank waits for at this moment.

    Who waits for a rank that waits itself, waits for whom that one waits for. Where the peer is
    not known (a barrier), all ranks that compute are waited for.
    """
    rank, seen = waiting, set()
    while rank in current and current[rank].state == WAIT and rank not in seen:
        seen.add(rank)
        peer = current[rank].peer
        rank = waiting if peer is None else peer
    if rank in current and current[rank].state != WAIT:
        return [rank]
    at_work = [one for one, its in current.items() if its.state not in (WAIT, COMMUNICATE)]
    return at_work or [one for one, its in current.items() if its.state == COMMUNICATE]
