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
from dataclasses import dataclass

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
from labkit.units import format_number

_BETWEEN = "between its messages"
# A rank that computes this many times as long as the others is a straggler.
_STRAGGLER = 1.25
# The share of all waiting that has to be for one rank, before that rank is named.
_MOSTLY = 0.6
# Smaller shares of the time are not mentioned.
_MENTIONED = 0.02
# Two stages without micro-batches wait for each other half of the time.
_BUBBLE = 0.3
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
        text = (
            "The run recorded no span: its time went on code that neither sends, receives nor "
            "opens comm.span."
        )
        return Limit("nothing", text, None, {})
    shares = {
        state: statistics.fmean(one.seconds[state] / one.elapsed_s for one in counted)
        for state in (COMPUTE, COMMUNICATE, WAIT, GAP)
    }
    has_stages = {"forward", "backward"} <= set(trace.kinds)
    slow, slowdown, work = _slowest(times, has_stages)

    # The rank that the others waited for longest, and whether most of all waiting was for it.
    blamed_s = {rank: sum(one.blamed_s.values()) for rank, one in times.items()}
    most = max(blamed_s, key=blamed_s.__getitem__)
    is_one = blamed_s[most] > _MOSTLY * sum(blamed_s.values())

    largest = max(shares, key=shares.__getitem__)
    is_slow = slow == most and slowdown > _STRAGGLER
    # A server that is busy with messages while others wait for it: both shares show it.
    is_busy = times[most].blamed_s[COMMUNICATE] > blamed_s[most] / 2 and shares[WAIT] > 0.25
    if is_one and is_slow and shares[WAIT] > max(_NOTICED, shares[COMMUNICATE]):
        kind = "straggler"
    elif is_one and (largest == WAIT or (largest == COMMUNICATE and is_busy)):
        kind = "bottleneck"
    else:
        kind = "bubble" if has_stages and shares[WAIT] > _BUBBLE else _KINDS[largest]
    rank = most if kind in ("straggler", "bottleneck") else None

    others = [one for other, one in times.items() if other != most]
    awaited = blamed_s[most] / (sum(one.elapsed_s for one in others) or 1.0)
    if rank is None:
        state = WAIT if kind == "bubble" else largest
        whose = "the ranks' time" if len(times) > 1 else "the time"
        limited = {
            "computing": f"Computing limited the run: it took {{}} of {whose}",
            "communication": "Communication limited the run: messages that no computing hid took "
            f"{{}} of {whose}",
            "unrecorded": f"{gap[0].upper()}{gap[1:]} limited the run: {{}} of {whose}",
            "bubble": "The bubble limited the run: the stages waited for each other in {} of "
            "their time",
            "waiting": "Waiting limited the run: the ranks waited for each other in {} of their "
            "time, for no rank much longer than for the others",
        }[kind].format(_percent(shares[state]))
    else:
        state, they, their = WAIT, "the others", "their"
        if len(others) == 1:
            they, their = f"rank {next(one for one in times if one != rank)}", "its"
        waited = f"{they} waited for it {_percent(awaited)} of {their} time"
        did = _DOES[max(times[rank].blamed_s, key=times[rank].blamed_s.__getitem__)]
        limited = f"Rank {rank} limited the run: {waited}, while it {did}"
        if kind == "straggler":
            factor = format_number(slowdown)
            limited = (
                f"Rank {rank} limited the run: it took {factor} times as long as {they} {work}, "
                f"and {waited}"
            )

    # What took time beside the limit, and what did not because it was hidden.
    for_whom = f" (mostly for rank {most})" if is_one and len(times) > 2 else ""
    names = {COMPUTE: "computing", COMMUNICATE: "messages", WAIT: f"waiting{for_whom}", GAP: gap}
    rest = [
        f"{names[one]} {_percent(share)}"
        for one, share in sorted(shares.items(), key=lambda item: -item[1])
        if one != state and share > _MENTIONED
    ]
    parts = [f"The rest: {', '.join(rest)}"] if rest else []
    hidden_s = sum(one.hidden_s for one in times.values())
    sent_s = hidden_s + sum(one.seconds[COMMUNICATE] for one in times.values())
    hidden = hidden_s / sent_s if sent_s else 0.0
    if hidden > _MENTIONED:
        parts.append(f"{_percent(hidden)} of all communication was hidden behind computing")
    others_s = sum(one.elapsed_s for other, one in times.items() if other != slow)
    is_harmless = rank is None and blamed_s[slow] <= _NOTICED * others_s
    if slowdown > _STRAGGLER and is_harmless and work != _BETWEEN:
        parts.append(
            f"Rank {slow} took {format_number(slowdown)} times as long as other ranks {work}, "
            "and hardly any of them waited for it"
        )
    device = "cpu" if rank is None else trace.devices.get(rank, "cpu")
    if device != "cpu":
        sharing = [str(one) for one, its in sorted(trace.devices.items()) if its == device]
        parts.append(f"On {device}: rank{'s' * (len(sharing) > 1)} {', '.join(sharing)}")
    text = " ".join(f"{part}." for part in (limited, *parts))
    return Limit(kind, text, rank, shares, hidden, slowdown)


def _slowest(times: dict[int, RankTimes], has_stages: bool) -> tuple[int, float, str]:
    """The rank that takes longest for its work, how many times as long as others, and what for.

    Compared is computing per unit of work; if that is even, all that is not messages.
    """

    def compared(seconds: dict[int, float], work: str) -> tuple[int, float, str]:
        rank = max(seconds, key=seconds.__getitem__)
        usual_s = statistics.median([s for one, s in seconds.items() if one != rank] or [0.0])
        return rank, seconds[rank] / usual_s if usual_s else 1.0, work

    own_s = {rank: one.seconds[COMPUTE] + one.seconds[GAP] for rank, one in times.items()}
    between = compared(own_s, _BETWEEN)
    computed_s = {rank: one.unit_s for rank, one in times.items() if one.unit_s}
    if not computed_s:
        return between
    work = "for its stage" if has_stages else "for the same amount of work"
    computes = compared(computed_s, work)
    is_even = computes[1] < _STRAGGLER and not has_stages
    return between if is_even and between[1] > _STRAGGLER else computes


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"
