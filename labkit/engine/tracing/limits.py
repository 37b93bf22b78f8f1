"""The state of each rank at each moment of a trace, and the limit of the run in two sentences.

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
from collections.abc import Collection
from dataclasses import dataclass, field
from operator import itemgetter

from labkit.engine.tracing.spans import LOCAL_KINDS, STEP_KINDS, Span, Trace
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
_NOTHING = "No rank recorded a span, of what it computes, sends or receives."
# In words, the state of the rank for which the others waited.
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
    """The seconds of one rank by state, and those with which they are compared.

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
    """The limit of a run; it prints as one or two sentences, its ``text``.

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
    changes = []
    for span in trace.spans:
        changes.append((span.start_s, 1, span))
        changes.append((span.end_s, -1, span))
    changes.sort(key=itemgetter(0, 1))
    times = {rank: RankTimes(unit_s=_unit_s(trace.of(rank))) for rank in trace.ranks}
    # A rank whose trace has ended is not waited for.
    spans_left = Counter(span.rank for span in trace.spans)
    active = {rank: Counter() for rank in times}
    state_at: dict[int, str] = {}
    if not trace.apart:
        state_at = dict.fromkeys(times, GAP)
    peer_of = dict.fromkeys(times)
    if start_s is None:
        start_s = changes[0][0] if changes else 0.0
    now_s = start_s
    for at_s, step, span in changes:
        passed_s = at_s - now_s
        if passed_s > 0:
            now_s = at_s
            for rank, state in state_at.items():
                times[rank].seconds[state] += passed_s
                if state == COMPUTE and active[rank][COMMUNICATE]:
                    times[rank].hidden_s += passed_s
                if state == WAIT:
                    culprits = _culprits(rank, state_at, peer_of)
                    for culprit in culprits:
                        times[culprit].blamed_s[state_at[culprit]] += passed_s / len(culprits)
        rank = span.rank
        state = state_of(span.kind)
        active[rank][state] += step
        if step > 0 and state == WAIT:
            peer_of[rank] = span.peer
        state_at[rank] = next((state for state in _ORDER if active[rank][state]), GAP)
        if step < 0:
            spans_left[rank] -= 1
        if not spans_left[rank]:
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
    culprit = waiting
    for _ in state_at:
        peer = peer_of.get(culprit)  # None of a rank that has left no span
        if state_at.get(culprit) == WAIT and peer is not None:
            culprit = peer
    if state_at.get(culprit, WAIT) != WAIT:
        return [culprit]
    # In a barrier the peer is not known.
    at_work = [rank for rank, state in state_at.items() if state not in (WAIT, COMMUNICATE)]
    return at_work or [rank for rank, state in state_at.items() if state == COMMUNICATE]


def what_limited(
    trace: Trace, start_s: float | None = None, gap: str = "code outside all spans"
) -> Limit:
    """Find what limited the run with this trace of all ranks.

    ``start_s`` is when they started (the first span), ``gap`` what a rank does where it records
    nothing, in words.
    """
    times = rank_times(trace, start_s)
    has_stages = _has_stages(trace)
    if has_stages:
        _add_idle_ends(times, trace)
    counted = [rank_time for rank_time in times.values() if rank_time.elapsed_s]
    if not counted:
        return Limit("nothing", _NOTHING, None, {})
    shares = {}
    for state in _KINDS:
        shares[state] = statistics.fmean(rank.seconds[state] / rank.elapsed_s for rank in counted)
    # The rank that the others waited for longest, and whether most of all waiting was for it.
    blamed_s = {rank: sum(times[rank].blamed_s.values()) for rank in times}
    most = max(blamed_s, key=blamed_s.__getitem__)
    slowest, slowdown, work = _slowest(times, has_stages, most)
    times_as_long = format_number(slowdown) if slowdown < 10 else "more than ten"
    took = f"took {times_as_long} times as long as"
    is_one = blamed_s[most] > _MOSTLY * sum(blamed_s.values())
    cause = max(times[most].blamed_s, key=times[most].blamed_s.__getitem__, default=GAP)
    largest = max(shares, key=shares.__getitem__)
    # A server that is busy with messages while others wait for it: both shares show it.
    is_busy = times[most].blamed_s[COMMUNICATE] > blamed_s[most] / 2 and shares[WAIT] > 0.25
    is_slow = slowest == most and slowdown > _STRAGGLER
    culprit = None
    if is_one and is_slow and shares[WAIT] > max(_NOTICED, shares[COMMUNICATE]):
        kind = "straggler"
        culprit = most
        waiting, waited = _describe_waiting(most, times)
        first = f"Rank {most} limited the run: it {took} {waiting} {work}, and {waited}"
        if cause == INPUT:
            first += f", mostly while it {_DOES[INPUT]}"
        first += "."
    elif is_one and (largest == WAIT or (largest == COMMUNICATE and is_busy)):
        kind = "bottleneck"
        culprit = most
        _, waited = _describe_waiting(most, times)
        first = f"Rank {most} limited the run: {waited}, while it {_DOES[cause]}."
    else:
        kind = "bubble" if has_stages and shares[WAIT] > _BUBBLE else _KINDS[largest]
        subject = "the ranks' time" if len(times) > 1 else "the time"
        first = _LIMITED[kind].format(code=gap[0].upper() + gap[1:], whose=subject, **shares)
    names = _NAMES | {WAIT: "waiting", GAP: gap}
    if is_one and is_slow and len(times) > 2 and shares[WAIT] > _NOTICED:
        names[WAIT] = f"waiting (mostly for rank {most})"
    hidden = _hidden_share(times.values())
    parts = _describe_rest(kind, shares, names, hidden)
    is_alone = work != _BETWEEN and _is_unfelt(slowest, times, trace.apart)
    if culprit is None and is_alone and slowdown > _STRAGGLER:
        unfelt = "and they hardly waited for it"
        parts.append(f"rank {slowest} {took} other ranks {work}, {unfelt}")
    second = "; ".join(parts)
    text = f"{first} {second[:1].upper()}{second[1:]}." if second else first
    return Limit(kind, text, culprit, shares, hidden, slowdown)


def _is_unfelt(rank: int, times: dict[int, RankTimes], apart: bool) -> bool:
    """True if hardly any rank waited for this one; profiles without waiting do not show it."""
    others_s = sum(times[other].elapsed_s for other in times if other != rank)
    is_seen = not apart or any(rank_time.seconds[WAIT] for rank_time in times.values())
    return is_seen and sum(times[rank].blamed_s.values()) <= _NOTICED * others_s


def _has_stages(trace: Trace) -> bool:
    """True if the ranks are stages, not replicas, which average gradients."""
    kinds = set(trace.kinds)
    return {"forward", COMMUNICATE} <= kinds and len(STEP_KINDS & kinds) > 1


def _add_idle_ends(times: dict[int, RankTimes], trace: Trace) -> None:
    """Add the time for which a stage is idle until the last one ends."""
    end_s = max(span.end_s for span in trace.spans)
    for rank in times:
        times[rank].seconds[WAIT] += end_s - max(span.end_s for span in trace.of(rank))


def _hidden_share(times: Collection[RankTimes]) -> float:
    hidden_s = sum(rank.hidden_s for rank in times)
    message_s = hidden_s + sum(rank.seconds[COMMUNICATE] for rank in times)
    return hidden_s / message_s if message_s else 0.0


def _describe_rest(
    kind: str, shares: dict[str, float], names: dict[str, str], hidden: float
) -> list[str]:
    """The shares of the states other than the limit, the largest first, and the hidden share."""
    # Of a straggler, a bottleneck and a bubble the limit is waiting.
    state_of_kind = {kind: state for state, kind in _KINDS.items()}
    rest = names.keys() - {state_of_kind.get(kind, WAIT)}
    ordered = sorted(rest, key=lambda state: (shares[state], names[state]), reverse=True)
    listed = [f"{names[s]} {shares[s]:.0%}" for s in ordered if shares[s] > _MENTIONED]
    parts = []
    if listed:
        subject = "all ranks together" if kind in ("straggler", "bottleneck") else "the rest"
        parts.append(f"{subject}: {', '.join(listed)}")
    if hidden > _MENTIONED:
        parts.append(f"{hidden:.0%} of all communication was hidden behind computing")
    return parts


def _slowest(times: dict[int, RankTimes], has_stages: bool, most: int) -> tuple[int, float, str]:
    """The rank that takes longest, how many times as long as the others, and for what.

    For its computing, unless only all work between its messages shows why ``most`` is waited for.
    """
    computed_s = {}
    own_s = {}
    for rank, rank_times in times.items():
        seconds = rank_times.seconds
        own_s[rank] = seconds[COMPUTE] + seconds[GAP] + seconds[INPUT]
        if rank_times.unit_s:
            computed_s[rank] = rank_times.unit_s
    slowest, slowdown = _compare(computed_s)
    slowest_between, slowdown_between = _compare(own_s)
    is_other = slowest != most == slowest_between
    is_between = not has_stages and slowdown_between > _STRAGGLER
    is_between = is_between and (slowdown < _STRAGGLER or is_other)
    if not computed_s or is_between:
        return slowest_between, slowdown_between, _BETWEEN
    return slowest, slowdown, "for its stage" if has_stages else "for its part"


def _compare(seconds: dict[int, float]) -> tuple[int, float]:
    """The rank with most seconds, and how many times the median of the others' these are."""
    slowest = max(seconds, key=seconds.__getitem__, default=-1)
    usual_s = statistics.median([seconds[r] for r in seconds if r != slowest] or [0.0])
    return slowest, seconds[slowest] / usual_s if usual_s else 1.0


def _describe_waiting(rank: int, times: dict[int, RankTimes]) -> tuple[str, str]:
    """The others in words, and how long they waited for a rank."""
    waiting = [other for other in times if other != rank]
    elapsed_s = sum(times[other].elapsed_s for other in waiting)
    share = sum(times[rank].blamed_s.values()) / elapsed_s
    if len(waiting) == 1:
        return f"rank {waiting[0]}", f"rank {waiting[0]} waited for it {share:.0%} of its time"
    return "the others", f"the others waited for it {share:.0%} of their time"
