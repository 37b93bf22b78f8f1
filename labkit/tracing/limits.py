"""What each rank did at each moment of a trace, and what limited the run, in one or two sentences.

A rank computes while any of its lanes (threads) computes; it communicates where only messages are
under way, and waits where it only waits. So communication that overlaps with computing is hidden,
and the seconds of a rank's states add up to its elapsed time. The limit is one of:

computing        the ranks computed most of the time
straggler        one rank computes longer than the others, which wait for it
bottleneck       the others wait for one rank, which computes or exchanges messages with others
bubble           the stages of a pipeline are idle
waiting          ranks wait for each other, none much more than the others
communication    messages that no computing hides
input            loading data, while nothing else happens
unrecorded       code outside all spans
"""

import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from operator import itemgetter

from labkit.tracing.spans import LOCAL_KINDS, STEP_KINDS, Span, Trace
from labkit.units import format_number

COMPUTE, COMMUNICATE, WAIT, EVALUATE = "compute", "communicate", "wait", "evaluate"
# In a data loader. labkit's own loading of data is local work.
INPUT = "input"
# No span: code between the recorded operations.
GAP = "gap"
# Earlier states hide later ones.
_ORDER = (EVALUATE, COMPUTE, COMMUNICATE, WAIT, INPUT)
_KINDS = {COMPUTE: "computing", COMMUNICATE: "communication", GAP: "unrecorded", WAIT: "waiting"}
_KINDS |= {INPUT: "input"}
_NAMES = {COMPUTE: "computing", COMMUNICATE: "messages", INPUT: "input"}
_LIMITED = {
    "computing": "Computing limited the run: it took {compute:.0%} of {whose}.",
    "communication": "Communication limited the run: messages that no computing hid took "
    "{communicate:.0%} of {whose}.",
    "input": "Input limited the run: loading data, while nothing else happened, took {input:.0%} "
    "of {whose}.",
    "unrecorded": "{code} limited the run: {gap:.0%} of {whose}.",
    "bubble": "The bubble limited the run: the stages were idle for {wait:.0%} of their time.",
    "waiting": "Waiting limited the run: the ranks waited for each other in {wait:.0%} of their "
    "time, for no rank much longer than for the others.",
}
# What the rank did for which the others waited.
_DOES = {COMPUTE: "computed", COMMUNICATE: "exchanged messages with others"}
_DOES |= {EVALUATE: "evaluated", GAP: "ran code outside all spans", INPUT: "loaded data"}

# A rank that computes this many times as long as the others is a straggler.
_STRAGGLER = 1.25
# The share of all waiting that has to be for one rank, before that rank is named.
_MOSTLY = 0.6
# Smaller shares of the time are not mentioned.
_MENTIONED = 0.02
# Two stages without micro-batches wait for each other half of the time.
_BUBBLE = 0.3
# A straggler is the limit from this share of waiting on, if messages take less.
_NOTICED = 0.1
_BETWEEN = "between its messages"


@dataclass
class RankTimes:
    """The seconds of one rank by state, and what they are compared with.

    Attributes:
        seconds: by state; they add up to the time until the rank's last span.
        hidden_s: seconds of communication while the rank computed, which are not in ``seconds``.
        blamed_s: seconds in which other ranks waited for this one, by its state at that time.
        unit_s: seconds of computing per step, or, if loading data marks none, in the whole run.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden_s: float = 0.0
    blamed_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unit_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Without evaluation, which is no part of any technique."""
        return sum(s for state, s in self.seconds.items() if state != EVALUATE)


@dataclass(frozen=True)
class Limit:
    """What limited a run; it prints as one or two sentences, its ``text``.

    Attributes:
        kind: one of the kinds in this module's docstring, or ``nothing`` for an empty trace.
        rank: the straggler or the bottleneck; None for the other kinds.
        shares: of the ranks' time, without evaluation, the mean over the ranks: ``compute``,
            ``communicate``, ``wait``, ``input`` and ``gap`` (no span). They add up to 1.
        hidden: the share of all communication that overlapped with computing.
        slowdown: how many times as long the slowest rank computes as the others, per unit of work.
    """

    kind: str
    text: str
    rank: int | None
    shares: dict[str, float]
    hidden: float = 0.0
    slowdown: float = 1.0

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def state_of(kind: str) -> str:
    """The state of a rank during a span of this kind."""
    if kind in (WAIT, EVALUATE, INPUT):
        return kind
    # To compress is local work, too.
    return COMPUTE if kind in LOCAL_KINDS | {"compress"} else COMMUNICATE


def rank_times(trace: Trace, start_s: float | None = None) -> dict[int, RankTimes]:
    """The times of all ranks, by rank; ``start_s`` is when all had started (the first span)."""
    ends = [(span.end_s, -1, span) for span in trace.spans]
    changes = sorted([(s.start_s, 1, s) for s in trace.spans] + ends, key=itemgetter(0, 1))
    times = {rank: RankTimes(unit_s=_unit_s(trace.of(rank))) for rank in trace.ranks}
    # A rank whose trace has ended is not waited for.
    left = Counter(span.rank for span in trace.spans)
    active = {rank: Counter() for rank in times}
    state_at = dict.fromkeys(() if trace.apart else times, GAP)
    peer_of = dict.fromkeys(times)
    now_s = changes[0][0] if changes and start_s is None else start_s or 0.0
    for at_s, step, span in changes:
        passed_s, now_s = at_s - now_s, max(at_s, now_s)
        for one, its in state_at.items() if passed_s > 0 else ():
            times[one].seconds[its] += passed_s
            if its == COMPUTE and active[one][COMMUNICATE]:
                times[one].hidden_s += passed_s
            if its == WAIT:
                culprits = _culprits(one, state_at, peer_of)
                for culprit in culprits:
                    times[culprit].blamed_s[state_at[culprit]] += passed_s / len(culprits)
        rank, state = span.rank, state_of(span.kind)
        active[rank][state] += step
        if step > 0 and state == WAIT:
            peer_of[rank] = span.peer
        state_at[rank] = next((one for one in _ORDER if active[rank][one]), GAP)
        left[rank] -= step < 0
        if not left[rank]:
            del state_at[rank]
    return times


def _unit_s(spans: list[Span]) -> float:
    """Median seconds of computing in one unit of work; each loading of data begins a unit."""
    units_s = [0.0]
    for span in spans:
        if span.kind == "data":
            units_s.append(0.0)
        elif span.kind in STEP_KINDS:
            units_s[-1] += span.duration_s
    # By the median: the first step takes many times as long as the others.
    return statistics.median([unit_s for unit_s in units_s if unit_s] or [0.0])


def _culprits(waiting: int, state_at: dict[int, str], peer_of: dict[int, int | None]) -> list[int]:
    """The ranks that a rank waits for at this moment, also by way of others that wait."""
    rank = waiting
    for _ in state_at:
        peer = peer_of[rank] if state_at.get(rank) == WAIT else None
        rank = rank if peer is None else peer
    if state_at.get(rank, WAIT) != WAIT:
        return [rank]
    # In a barrier the peer is not known.
    at_work = [one for one, its in state_at.items() if its not in (WAIT, COMMUNICATE)]
    return at_work or [one for one, its in state_at.items() if its == COMMUNICATE]


def what_limited(
    trace: Trace, start_s: float | None = None, gap: str = "code outside all spans"
) -> Limit:
    """What limited the run with this trace of all ranks.

    ``start_s`` is when they started (the first span), ``gap`` what a rank does where it records
    nothing, in words.
    """
    times = rank_times(trace, start_s)
    has_stages = "forward" in trace.kinds and len(STEP_KINDS & set(trace.kinds)) > 1
    end_s = max((span.end_s for span in trace.spans), default=0.0)
    # A stage is idle until the last one ends.
    for rank in times if has_stages else ():
        times[rank].seconds[WAIT] += end_s - max(span.end_s for span in trace.of(rank))
    counted = [one for one in times.values() if one.elapsed_s]
    if not counted:
        text = "No rank recorded a span, of what it computes, sends or receives."
        return Limit("nothing", text, None, {})
    shares = {
        state: statistics.fmean(one.seconds[state] / one.elapsed_s for one in counted)
        for state in _KINDS
    }
    slowest, slowdown, work = _slowest(times, has_stages)
    # The rank that the others waited for longest, and whether most of all waiting was for it.
    blamed_s = {rank: sum(one.blamed_s.values()) for rank, one in times.items()}
    most = max(blamed_s, key=blamed_s.__getitem__)
    is_one = blamed_s[most] > _MOSTLY * sum(blamed_s.values())
    largest = max(shares, key=shares.__getitem__)
    # A server that is busy with messages while others wait for it: both shares show it.
    is_busy = times[most].blamed_s[COMMUNICATE] > blamed_s[most] / 2 and shares[WAIT] > 0.25
    is_slow = slowest == most and slowdown > _STRAGGLER
    times_as_long = format_number(slowdown) if slowdown < 10 else "more than ten"
    rank, took = None, f"took {times_as_long} times as long as"
    if is_one and is_slow and shares[WAIT] > max(_NOTICED, shares[COMMUNICATE]):
        kind, rank, first = "straggler", most, _named(most, times, f"it {took} %s {work}, and %s")
    elif is_one and (largest == WAIT or (largest == COMMUNICATE and is_busy)):
        kind, rank, first = "bottleneck", most, _named(most, times, "")
    else:
        kind = "bubble" if has_stages and shares[WAIT] > _BUBBLE else _KINDS[largest]
        whose = "the ranks' time" if len(times) > 1 else "the time"
        first = _LIMITED[kind].format(code=gap[0].upper() + gap[1:], whose=whose, **shares)

    waiting = f"waiting (mostly for rank {most})" if is_one and len(times) > 2 else "waiting"
    names = _NAMES | {WAIT: waiting, GAP: gap}
    del names[next((state for state, name in _KINDS.items() if name == kind), WAIT)]
    rest = sorted(((shares[s], name) for s, name in names.items()), reverse=True)
    listed = ", ".join(f"{name} {share:.0%}" for share, name in rest if share > _MENTIONED)
    parts = [f"{'the rest' if rank is None else 'all ranks together'}: {listed}"] if listed else []
    hidden_s = sum(one.hidden_s for one in times.values())
    hidden = hidden_s / (hidden_s + sum(one.seconds[COMMUNICATE] for one in times.values()) or 1.0)
    if hidden > _MENTIONED:
        parts.append(f"{hidden:.0%} of all communication was hidden behind computing")
    others_s = sum(one.elapsed_s for one in times.values()) - times[slowest].elapsed_s
    is_alone = work != _BETWEEN and blamed_s[slowest] <= _NOTICED * others_s
    if rank is None and is_alone and slowdown > _STRAGGLER:
        unfelt = "and hardly any of them waited for it"
        parts.append(f"rank {slowest} {took} other ranks {work}, {unfelt}")
    second = "; ".join(parts)
    text = f"{first} {second[:1].upper()}{second[1:]}." if second else first
    return Limit(kind, text, rank, shares, hidden, slowdown)


def _slowest(times: dict[int, RankTimes], has_stages: bool) -> tuple[int, float, str]:
    """The rank that takes longest, how many times as long as the others, and for what."""
    work = "for its stage" if has_stages else "for its part"
    computed_s = {rank: one.unit_s for rank, one in times.items() if one.unit_s}
    own_s = {
        rank: sum(one.seconds[s] for s in (COMPUTE, GAP, INPUT)) for rank, one in times.items()
    }
    found = []
    for seconds, what in ((computed_s, work), (own_s, _BETWEEN)):
        rank = max(seconds, key=seconds.__getitem__, default=-1)
        usual_s = statistics.median([s for one, s in seconds.items() if one != rank] or [0.0])
        found.append((rank, seconds[rank] / usual_s if usual_s else 1.0, what))
    computes, between = found
    if not computed_s or (not has_stages and computes[1] < _STRAGGLER < between[1]):
        return between
    return computes


def _named(rank: int, times: dict[int, RankTimes], slow: str) -> str:
    """The sentence about the rank for which the others waited; ``slow``: of a straggler."""
    mine, others = times[rank].blamed_s, [one for one in times if one != rank]
    share = sum(mine.values()) / sum(times[one].elapsed_s for one in others)
    they, their = (f"rank {others[0]}", "its") if len(others) == 1 else ("the others", "their")
    waited = f"{they} waited for it {share:.0%} of {their} time"
    does = _DOES[max(mine, key=mine.__getitem__)]
    text = slow % (they, waited) if slow else f"{waited}, while it {does}"
    if slow and does == _DOES[INPUT]:
        text += f", mostly while it {does}"
    return f"Rank {rank} limited the run: {text}."
