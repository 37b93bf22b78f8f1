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
    if not any(one.elapsed_s for one in times.values()):
        return Limit("nothing", "The trace is empty: no rank recorded a span.", None, {})
    shares = _shares(times)
    has_stages = {"forward", "backward"} <= set(trace.kinds)
    slowest = _slowest(times, has_stages)
    kind, rank = _kind(times, shares, slowest, has_stages)
    hidden_s = sum(one.hidden_s for one in times.values())
    sent_s = hidden_s + sum(one.seconds[COMMUNICATE] for one in times.values())
    hidden = hidden_s / sent_s if sent_s else 0.0
    limit = Limit(kind, "", rank, shares, hidden, slowest.factor)
    first = _first_sentence(limit, times, gap, slowest.work)
    rest = _second_sentence(limit, times, gap, slowest)
    where = "" if rank is None else _device_sentence(trace, rank)
    return replace(limit, text=" ".join(filter(None, (first, rest, where))))


def _device_sentence(trace: Trace, rank: int) -> str:
    """The GPU of the rank that is named, and who shares it; empty on the CPU."""
    device = trace.devices.get(rank, "cpu")
    if device == "cpu":
        return ""
    others = [str(r) for r, d in sorted(trace.devices.items()) if d == device and r != rank]
    ranks = "ranks" if len(others) > 1 else "rank"
    shared = f", which it shares with {ranks} {', '.join(others)}" if others else ""
    return f"Rank {rank} is on {device}{shared}."


def _shares(times: dict[int, RankTimes]) -> dict[str, float]:
    counted = [one for one in times.values() if one.elapsed_s]
    return {
        state: statistics.fmean(one.seconds[state] / one.elapsed_s for one in counted)
        for state in (COMPUTE, COMMUNICATE, WAIT, GAP)
    }


@dataclass(frozen=True)
class Slowest:
    """The rank that takes longest for its work, how many times as long as the others, and what."""

    rank: int
    factor: float
    work: str


def _slowest(times: dict[int, RankTimes], has_stages: bool) -> Slowest:
    """Compare the ranks' computing per unit of work; if that is even, all that is not messages."""
    work = "for its stage" if has_stages else "for the same amount of work"
    units_s = {rank: one.unit_s for rank, one in times.items() if one.unit_s}
    own_s = {rank: one.seconds[COMPUTE] + one.seconds[GAP] for rank, one in times.items()}
    computes = _compared(units_s, work) if units_s else None
    if computes is None or (computes.factor < _STRAGGLER and not has_stages):
        works = _compared(own_s, _BETWEEN)
        if computes is None or works.factor > _STRAGGLER:
            return works
    return computes


def _compared(seconds: dict[int, float], work: str) -> Slowest:
    rank = max(seconds, key=seconds.__getitem__)
    usual_s = statistics.median([s for other, s in seconds.items() if other != rank] or [0.0])
    return Slowest(rank, seconds[rank] / usual_s if usual_s else 1.0, work)


def _kind(
    times: dict[int, RankTimes], shares: dict[str, float], slowest: Slowest, has_stages: bool
) -> tuple[str, int | None]:
    """The kind of the limit, and the rank that is named with it."""
    most, is_one = _most_awaited(times)
    is_slow = slowest.rank == most and slowest.factor > _STRAGGLER
    waits_more = shares[WAIT] > max(_NOTICED, shares[COMMUNICATE])
    if waits_more and is_one and is_slow:
        return "straggler", most
    largest = max(shares, key=shares.__getitem__)
    # A server that is busy with messages while others wait for it: both shares show it.
    blamed_s = times[most].blamed_s
    is_busy = blamed_s[COMMUNICATE] > sum(blamed_s.values()) / 2 and shares[WAIT] > 0.25
    if is_one and (largest == WAIT or (largest == COMMUNICATE and is_busy)):
        return "bottleneck", most
    if has_stages and shares[WAIT] > _BUBBLE:
        return "bubble", None
    if largest == WAIT:
        return "waiting", None
    names = {COMPUTE: "computing", COMMUNICATE: "communication", GAP: "unrecorded"}
    return names[largest], None


def _most_awaited(times: dict[int, RankTimes]) -> tuple[int, bool]:
    """The rank that the others waited for longest, and whether most of all waiting was for it."""
    blamed = {rank: sum(one.blamed_s.values()) for rank, one in times.items()}
    most = max(blamed, key=blamed.__getitem__)
    return most, blamed[most] > _MOSTLY * sum(blamed.values())


def _first_sentence(limit: Limit, times: dict[int, RankTimes], gap: str, work: str) -> str:
    shares = limit.shares
    if limit.rank is not None:
        return _named(limit, times, work)
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
    }[limit.kind]


def _named(limit: Limit, times: dict[int, RankTimes], work: str) -> str:
    """The sentence on the rank that the others waited for."""
    assert limit.rank is not None
    mine = times[limit.rank]
    others = [rank for rank in times if rank != limit.rank]
    blamed_s = sum(mine.blamed_s.values())
    share = blamed_s / sum(times[rank].elapsed_s for rank in others)
    is_one = len(others) == 1
    they = f"rank {others[0]}" if is_one else "the others"
    waited = f"{they} waited for it {_percent(share)} of {'its' if is_one else 'their'} time"
    if limit.kind == "straggler":
        return (
            f"Rank {limit.rank} limited the run: it took {format_number(limit.slowdown)} times as "
            f"long as {they} {work}, and {waited}."
        )
    does = max(mine.blamed_s, key=mine.blamed_s.__getitem__)
    while_it = "exchanged messages with others" if does == COMMUNICATE else "computed"
    if does == EVALUATE:
        while_it = "evaluated"
    elif does == GAP:
        while_it = "ran code outside all spans"
    return f"Rank {limit.rank} limited the run: {waited}, while it {while_it}."


def _second_sentence(limit: Limit, times: dict[int, RankTimes], gap: str, slowest: Slowest) -> str:
    """What else took time, and what did not because it was hidden; empty if there is nothing."""
    most, is_one = _most_awaited(times)
    waiting = f"waiting (mostly for rank {most})" if is_one and len(times) > 2 else "waiting"
    names = {COMPUTE: "computing", COMMUNICATE: "messages", WAIT: waiting, GAP: gap}
    of_limit = {"computing": COMPUTE, "communication": COMMUNICATE, "unrecorded": GAP}
    mentioned = of_limit.get(limit.kind, WAIT)
    by_size = sorted(limit.shares.items(), key=lambda item: -item[1])
    rest = [
        f"{names[state]} {_percent(share)}"
        for state, share in by_size
        if state != mentioned and share > _MENTIONED
    ]
    parts = [f"the rest: {', '.join(rest)}"] if rest else []
    if limit.hidden > _MENTIONED:
        parts.append(f"{_percent(limit.hidden)} of all communication was hidden behind computing")
    is_slow = slowest.factor > _STRAGGLER and slowest.work != _BETWEEN
    if limit.rank is None and is_slow and not _is_awaited(slowest.rank, times):
        times_as_long = f"{format_number(slowest.factor)} times as long as other ranks"
        parts.append(
            f"rank {slowest.rank} took {times_as_long} {slowest.work}, and hardly any of them "
            "waited for it"
        )
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _is_awaited(rank: int, times: dict[int, RankTimes]) -> bool:
    others_s = sum(one.elapsed_s for other, one in times.items() if other != rank)
    return sum(times[rank].blamed_s.values()) > _NOTICED * others_s


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"


def without_spans(duration_s: float) -> Limit:
    """The limit of a run whose ranks recorded nothing."""
    text = (
        f"The run recorded no span: its {format_seconds(duration_s)} went on code that neither "
        "sends, receives nor opens comm.span."
    )
    return Limit("unrecorded", text, None, {GAP: 1.0})
