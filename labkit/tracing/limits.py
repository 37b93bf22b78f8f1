"""What limited a run, in one or two sentences made from its trace.

computing        the ranks computed most of the time
straggler        one rank computes longer than the others, which wait for it
bottleneck       the others wait for one rank, which computes or exchanges messages with others
bubble           the stages of a pipeline wait for each other
waiting          ranks wait for each other, none much more than the others
communication    messages that no computing hides
unrecorded       code outside all spans
"""

import html
import statistics
from dataclasses import dataclass, replace

from labkit.tracing.spans import Trace
from labkit.tracing.states import (
    COMMUNICATE,
    COMPUTE,
    EVALUATE,
    GAP,
    WAIT,
    RankTimes,
    rank_times,
)
from labkit.units import format_number, format_seconds

# A rank that computes this many times as long as the others is a straggler.
_STRAGGLER = 1.25
# The share of all waiting that has to be for one rank, before that rank is named.
_MOSTLY = 0.6
# Smaller shares of the time are not mentioned.
_MENTIONED = 0.02
# Two stages without micro-batches wait for each other half of the time.
_BUBBLE = 0.3
_BETWEEN = "between its messages"
_KINDS = {COMPUTE: "computing", COMMUNICATE: "communication", GAP: "unrecorded", WAIT: "waiting"}
# What the rank did for which the others waited.
_DOES = {COMPUTE: "computed", COMMUNICATE: "exchanged messages with others"}
_DOES |= {EVALUATE: "evaluated", GAP: "ran code outside all spans"}
# A straggler is the limit from this share of waiting on, if messages take less.
_NOTICED = 0.1


@dataclass(frozen=True)
class Limit:
    """What limited a run; it prints as one or two sentences.

    Attributes:
        kind: one of the kinds in this module's docstring, or ``nothing`` for an empty trace.
        text: the sentences.
        rank: the straggler or the bottleneck; None for the other kinds.
        shares: shares of the ranks' time, without evaluation, the mean over the ranks:
            ``compute``, ``communicate``, ``wait`` and ``gap`` (no span). They add up to 1.
        hidden: the share of all communication that overlapped with computing.
        slowdown: how many times as long the slowest rank computes as the others, per unit of
            work; 1 where it cannot be compared.
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

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.text)}</p>"


def what_limited(
    trace: Trace, start_s: float | None = None, gap: str = "code outside all spans"
) -> Limit:
    """What limited the run with this trace.

    Args:
        trace: of all ranks.
        start_s: when all ranks started; None means with the first span.
        gap: what a rank does where it records nothing, in words.
    """
    times = rank_times(trace, start_s)
    counted = [one for one in times.values() if one.elapsed_s]
    if not counted:
        return Limit("nothing", "The trace is empty: no rank recorded a span.", None, {})
    shares = {
        state: statistics.fmean(one.seconds[state] / one.elapsed_s for one in counted)
        for state in (COMPUTE, COMMUNICATE, WAIT, GAP)
    }
    has_stages = {"forward", "backward"} <= set(trace.kinds)
    slowest = _slowest(times, has_stages)

    # The rank that the others waited for longest, and whether most of all waiting was for it.
    blamed_s = {rank: sum(one.blamed_s.values()) for rank, one in times.items()}
    most = max(blamed_s, key=blamed_s.__getitem__)
    is_one = blamed_s[most] > _MOSTLY * sum(blamed_s.values())

    largest = max(shares, key=shares.__getitem__)
    is_slow = slowest.rank == most and slowest.factor > _STRAGGLER
    # A server that is busy with messages while others wait for it: both shares show it.
    is_busy = times[most].blamed_s[COMMUNICATE] > blamed_s[most] / 2 and shares[WAIT] > 0.25
    rank = None
    if is_one and is_slow and shares[WAIT] > max(_NOTICED, shares[COMMUNICATE]):
        kind, rank = "straggler", most
    elif is_one and (largest == WAIT or (largest == COMMUNICATE and is_busy)):
        kind, rank = "bottleneck", most
    elif has_stages and shares[WAIT] > _BUBBLE:
        kind = "bubble"
    else:
        kind = _KINDS[largest]

    hidden_s = sum(one.hidden_s for one in times.values())
    sent_s = hidden_s + sum(one.seconds[COMMUNICATE] for one in times.values())
    hidden = hidden_s / sent_s if sent_s else 0.0
    limit = Limit(kind, "", rank, shares, hidden, slowest.factor)
    sentences = [_first_sentence(limit, times, slowest, gap)]
    sentences += [_second_sentence(limit, times, slowest, gap, most if is_one else None)]
    sentences += [] if rank is None else [_device_sentence(trace, rank)]
    return replace(limit, text=" ".join(filter(None, sentences)))


@dataclass(frozen=True)
class Slowest:
    """The rank that takes longest for its work, how many times as long as the others, and what."""

    rank: int
    factor: float
    work: str


def _slowest(times: dict[int, RankTimes], has_stages: bool) -> Slowest:
    """Compare the ranks' computing per unit of work; if that is even, all that is not messages."""

    def compared(seconds: dict[int, float], work: str) -> Slowest:
        rank = max(seconds, key=seconds.__getitem__)
        usual_s = statistics.median([s for one, s in seconds.items() if one != rank] or [0.0])
        return Slowest(rank, seconds[rank] / usual_s if usual_s else 1.0, work)

    computed_s = {rank: one.unit_s for rank, one in times.items() if one.unit_s}
    own_s = {rank: one.seconds[COMPUTE] + one.seconds[GAP] for rank, one in times.items()}
    between = compared(own_s, _BETWEEN)
    if not computed_s:
        return between
    work = "for its stage" if has_stages else "for the same amount of work"
    computes = compared(computed_s, work)
    is_even = computes.factor < _STRAGGLER and not has_stages
    return between if is_even and between.factor > _STRAGGLER else computes


def _first_sentence(limit: Limit, times: dict[int, RankTimes], slowest: Slowest, gap: str) -> str:
    kind, rank, shares = limit.kind, limit.rank, limit.shares
    if rank is not None:
        mine, others = times[rank].blamed_s, [one for one in times if one != rank]
        share = sum(mine.values()) / sum(times[one].elapsed_s for one in others)
        they, their = (f"rank {others[0]}", "its") if len(others) == 1 else ("the others", "their")
        waited = f"{they} waited for it {_percent(share)} of {their} time"
        if kind == "straggler":
            return (
                f"Rank {rank} limited the run: it took {format_number(slowest.factor)} times as "
                f"long as {they} {slowest.work}, and {waited}."
            )
        does = _DOES[max(mine, key=mine.__getitem__)]
        return f"Rank {rank} limited the run: {waited}, while it {does}."
    whose = "the ranks' time" if len(times) > 1 else "the time"
    return {
        "computing": f"Computing limited the run: it took {_percent(shares[COMPUTE])} of {whose}.",
        "communication": "Communication limited the run: messages that no computing hid took "
        f"{_percent(shares[COMMUNICATE])} of {whose}.",
        "unrecorded": f"{gap[0].upper()}{gap[1:]} limited the run: {_percent(shares[GAP])} of "
        f"{whose}.",
        "bubble": "The bubble limited the run: the stages waited for each other in "
        f"{_percent(shares[WAIT])} of their time.",
        "waiting": "Waiting limited the run: the ranks waited for each other in "
        f"{_percent(shares[WAIT])} of their time, for no rank much longer than for the others.",
    }[kind]


def _second_sentence(
    limit: Limit, times: dict[int, RankTimes], slowest: Slowest, gap: str, awaited: int | None
) -> str:
    """What took time beside the limit, and what did not because it was hidden; often empty."""
    waiting = "waiting"
    if awaited is not None and len(times) > 2:
        waiting = f"waiting (mostly for rank {awaited})"
    names = {COMPUTE: "computing", COMMUNICATE: "messages", WAIT: waiting, GAP: gap}
    mentioned = next((state for state, kind in _KINDS.items() if kind == limit.kind), WAIT)
    rest = [
        f"{names[state]} {_percent(share)}"
        for state, share in sorted(limit.shares.items(), key=lambda item: -item[1])
        if state != mentioned and share > _MENTIONED
    ]
    parts = [f"the rest: {', '.join(rest)}"] if rest else []
    if limit.hidden > _MENTIONED:
        parts.append(f"{_percent(limit.hidden)} of all communication was hidden behind computing")
    blamed_s = sum(times[slowest.rank].blamed_s.values())
    others_s = sum(one.elapsed_s for other, one in times.items() if other != slowest.rank)
    alone = limit.rank is None and slowest.work != _BETWEEN and blamed_s <= _NOTICED * others_s
    if alone and slowest.factor > _STRAGGLER:
        parts.append(
            f"rank {slowest.rank} took {format_number(slowest.factor)} times as long as other "
            f"ranks {slowest.work}, and hardly any of them waited for it"
        )
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _device_sentence(trace: Trace, rank: int) -> str:
    """The GPU of the rank that is named, and who shares it; empty on the CPU."""
    device = trace.devices.get(rank, "cpu")
    if device == "cpu":
        return ""
    others = [str(r) for r, d in sorted(trace.devices.items()) if d == device and r != rank]
    ranks = "ranks" if len(others) > 1 else "rank"
    shared = f", which it shares with {ranks} {', '.join(others)}" if others else ""
    return f"Rank {rank} is on {device}{shared}."


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"


def without_spans(duration_s: float) -> Limit:
    """The limit of a run whose ranks recorded nothing."""
    text = (
        f"The run recorded no span: its {format_seconds(duration_s)} went on code that neither "
        "sends, receives nor opens comm.span."
    )
    return Limit("unrecorded", text, None, {GAP: 1.0})
