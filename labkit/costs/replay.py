"""A recorded run played again, on paper: its work as it was, messages and waiting computed anew.

Every lane (thread) of every rank takes its spans in the order in which they were recorded:

1. Local work takes as long as it did, times its rank's factor if it is computing. So does the
   code between two spans.
2. A message begins when both of its ranks have come to it, and takes what its recorded span took
   beyond that and beyond the recorded link, then what the new link takes. As on an emulated link
   (``labkit.engine.comm.emulated_link``) each rank has a card with two sides, on which messages
   queue up.
3. An operation of another thread begins when its caller has come to the call, and a ``wait`` ends
   with the operations that it waits for.

Events happen in the order of their times, so cards serve first who comes first. Not modeled:
that ranks share cores, and a ``recv_any`` that would have served another rank first.

Sources: discrete-event simulation of traces as in Zhu et al., "Daydream: accurately estimating
the efficacy of optimizations for DNN training" (2020), section 4.
"""

import bisect
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.costs.link import Link
from labkit.engine.tracing.spans import STEP_KINDS, Span, Trace

# Spans that touch are nearer to each other than this.
_TOUCH_S = 1e-7
# The two halves of a ring.
RING_KINDS = {"share_reduce", "share_only"}


@dataclass(eq=False, slots=True)
class Step:
    """One recorded span of a lane; the waiting before a message is a part of its step.

    Attributes:
        arrival_s: when the rank came to it.
        gap_s: seconds of code before it that no span covers.
        own_s: what it took, without waiting and without the recorded link.
        partners: the steps of all ranks that take part in its messages, this one among them.
        awaited: the numbers of this rank's calls that it waits for.
        calls: the recorded seconds at which calls were made during it or the gap before it, with
            the first step of each.
    """

    span: Span
    arrival_s: float
    gap_s: float = 0.0
    own_s: float = 0.0
    partners: list["Step"] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)
    calls: list[tuple[float, "Step"]] = field(default_factory=list)
    is_called: bool = False

    @property
    def is_message(self) -> bool:
        return any(src != dst or src < 0 for src, dst, _ in self.span.messages)

    @property
    def is_joint(self) -> bool:
        """True for an operation of all ranks: a barrier, or a collective in shared memory."""
        return any(src < 0 for src, _, _ in self.span.messages)


Lanes = dict[tuple[int, int], list[Step]]


@dataclass(slots=True)
class _Played:
    """A step in a replay, so far; ``num_late`` of its partners have not come yet."""

    num_late: int
    called_s: float | None = None
    free_s: float | None = None  # when its lane had come to it
    began_s: float = 0.0
    ready_s: float = 0.0  # when its rank had come to its messages
    moved_s: float = 0.0  # when all of their ranks had
    end_s: float = 0.0


@dataclass(frozen=True)
class Network:
    """The links of a replay; with ``ranks_per_host`` the ranks of a host share its card."""

    link: Link
    ranks_per_host: int | None = None

    def card_of(self, rank: int) -> int:
        """The number of the card with which a rank sends and receives."""
        return rank // (self.ranks_per_host or 1)

    def passes(self, rank: int, other: int) -> bool:
        """True if messages between two ranks take the link."""
        return self.ranks_per_host is None or self.card_of(rank) != self.card_of(other)

    def __str__(self) -> str:
        if self.ranks_per_host is None:
            return str(self.link)
        return f"{self.link} between hosts of {self.ranks_per_host} ranks"


class _Card:
    """A network card: until when its two sides are busy."""

    def __init__(self, network: Network):
        self.link = network.link
        self.is_shared = network.ranks_per_host is not None
        self.free_s = [0.0, 0.0]

    def book(self, now_s: float, sizes: Sequence[int | None]) -> float:
        """Put a message on each side that has one; returns when the later of the two ends."""
        end_s = now_s
        for side, num_bytes in enumerate(sizes):
            if num_bytes is None:
                continue
            free_s = max(now_s, self.free_s[side])
            free_s += num_bytes * self.link.beta_s_per_byte
            end_s = max(end_s, free_s + self.link.alpha_s)
            if not self.is_shared:
                free_s += self.link.alpha_s
            self.free_s[side] = free_s
        return end_s


def lanes_of(trace: Trace, network: Network | None = None) -> Lanes:
    """The steps of each (rank, lane) of a trace that was recorded over this network."""
    spans_by_lane: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in trace.spans:
        spans_by_lane[span.rank, span.lane].append(span)
    lanes = {lane: _steps_of(spans) for lane, spans in spans_by_lane.items()}
    for rank, lane in lanes:
        if lane == 0:
            _find_calls(rank, lanes)
    match(lanes)
    start_s = min(span.start_s for span in trace.spans)
    for steps in lanes.values():
        _time(steps, start_s, network)
    return lanes


def _steps_of(spans: Sequence[Span]) -> list[Step]:
    """Join each message with the waiting before it."""
    steps: list[Step] = []
    for span in spans:
        arrival_s = span.start_s
        if span.messages and steps:
            before = steps[-1].span
            touches = abs(before.end_s - arrival_s) < _TOUCH_S
            if before.kind == "wait" and not before.messages and touches:
                arrival_s = steps.pop().arrival_s
        awaited = {number for src, dst, number in span.messages if 0 <= src == dst}
        steps.append(Step(span, arrival_s, awaited=awaited))
    return steps


def _find_calls(rank: int, lanes: Lanes) -> None:
    """Note in the rank's main lane when it calls operations that other lanes carry out."""
    main = lanes[rank, 0]
    ends_s = [step.span.end_s for step in main]
    numbers = {step.span.call[0] for step in main if step.span.call}
    previous = None
    for step in main:
        # An operation that the caller carries out itself comes after those of the queue.
        if step.span.call and step.span.call != previous:
            earlier = step.span.call[0] - 1
            if earlier not in numbers:
                step.awaited.add(earlier)
        previous = step.span.call
    for (other_rank, lane), steps in lanes.items():
        if other_rank != rank or lane == 0:
            continue
        previous = None
        for step in steps:
            if step.span.call and step.span.call != previous:
                called_s = step.span.call[1]
                index = min(bisect.bisect_right(ends_s, called_s), len(main) - 1)
                main[index].calls.append((called_s, step))
                step.is_called = True
            previous = step.span.call
    for step in main:
        step.calls.sort(key=lambda call: call[0])


def match(lanes: Lanes) -> None:
    """Find the partners of each message, by the number that both of its ends have."""
    by_message: dict[Any, list[Step]] = defaultdict(list)
    for steps in lanes.values():
        for step in steps:
            if step.is_message:
                for message in dict.fromkeys(step.span.messages):
                    by_message[message].append(step)
    for partners in by_message.values():
        for step in partners:
            step.partners = list(dict.fromkeys([*step.partners, *partners]))


def _time(steps: Sequence[Step], start_s: float, network: Network | None) -> None:
    """Set the seconds of the steps' own work, and of the code between them."""
    before_s = start_s
    for step in steps:
        span = step.span
        free_s = before_s
        if step.is_called and span.call:
            free_s = max(free_s, span.call[1])
        step.gap_s = max(0.0, step.arrival_s - free_s)
        before_s = span.end_s
        if step.is_message:
            moved_s = max(partner.arrival_s for partner in step.partners)
            step.own_s = max(0.0, span.end_s - moved_s)
            if network is not None and not step.is_joint:
                cost_s = _Card(network).book(0.0, _sizes(step, network))
                step.own_s = max(0.0, step.own_s - cost_s)
        elif span.kind != "wait" or not step.awaited:
            step.own_s = span.duration_s


def _sizes(step: Step, network: Network) -> tuple[int | None, int | None]:
    """The bytes that a step sends and receives over its card, None for no message there."""
    out_bytes = in_bytes = None
    for message in step.span.messages:
        src, dst, _ = message
        if not network.passes(src, dst):
            continue
        if src == step.span.rank:
            out_bytes = step.span.num_bytes
            continue
        in_bytes = 0
        for partner in step.partners:
            if partner.span.rank == src and message in partner.span.messages:
                in_bytes = partner.span.num_bytes
    return out_bytes, in_bytes


class Replay:
    """The replay of ``lanes``, over a network or (None) with messages that cost nothing more.

    ``factors`` are by rank, for its computing.
    """

    def __init__(self, lanes: Lanes, network: Network | None, factors: Mapping[int, float]):
        self.lanes = lanes
        self.network = network
        self.factors = factors
        self.num_ranks = len({rank for rank, _ in lanes})
        self.cards: dict[int, _Card] = {}
        self.next_index = dict.fromkeys(lanes, 0)
        self.played: dict[Step, _Played] = {}
        # By rank and number, the steps of a call that have not ended, and who waits for that.
        self.missing: dict[tuple[int, int], int] = defaultdict(int)
        self.waiting: dict[tuple[int, int], list[Step]] = defaultdict(list)
        # (time, tie-breaker, what happens then, to which step)
        self.events: list[tuple[float, int, Callable[[float, Step], None], Step]] = []
        self.counter = itertools.count()
        for (rank, _), steps in lanes.items():
            for step in steps:
                self.played[step] = _Played(num_late=len(step.partners))
                if step.span.call:
                    self.missing[rank, step.span.call[0]] += 1

    def run(self) -> list[Span]:
        """The spans of the replay, which begins when the recorded run did.

        ValueError if ranks would wait for ever.
        """
        starts_s = [steps[0].arrival_s - steps[0].gap_s for steps in self.lanes.values()]
        for lane in self.lanes:
            self._free(min(starts_s), lane)
        while self.events:
            now_s, _, action, step = heapq.heappop(self.events)
            action(now_s, step)
        stuck = {lane: i for lane, i in self.next_index.items() if i < len(self.lanes[lane])}
        if stuck:
            rank, lane = min(stuck)
            span = self.lanes[rank, lane][stuck[rank, lane]].span
            raise ValueError(
                f"the trace does not fit together: rank {rank} never gets past its {span.kind} at "
                f"{span.start_s:.6g} s. Is it the trace of all ranks, from their start on?"
            )
        spans = []
        for steps in self.lanes.values():
            for step in steps:
                spans += self._spans_of(step)
        return spans

    def _schedule(self, time_s: float, action: Callable[[float, Step], None], step: Step) -> None:
        heapq.heappush(self.events, (time_s, next(self.counter), action, step))

    def _free(self, now_s: float, lane: tuple[int, int]) -> None:
        """End a lane's step: it comes to the next one, unless that has not been called yet."""
        index = self.next_index[lane]
        if index == len(self.lanes[lane]):
            return
        step = self.lanes[lane][index]
        played = self.played[step]
        played.free_s = now_s
        if step.is_called and played.called_s is None:
            return
        start_s = max(now_s, played.called_s or 0.0) + step.gap_s
        for called_s, called in step.calls:
            if called_s < step.arrival_s:
                self._schedule(
                    max(now_s, start_s - (step.arrival_s - called_s)), self._call, called
                )
        self._schedule(start_s, self._begin, step)

    def _call(self, now_s: float, step: Step) -> None:
        self.played[step].called_s = now_s
        if self.played[step].free_s is not None:
            self._schedule(now_s + step.gap_s, self._begin, step)

    def _begin(self, now_s: float, step: Step) -> None:
        self.played[step].began_s = now_s
        for called_s, called in step.calls:
            if called_s >= step.arrival_s:
                part = 0.0
                if not step.is_message and step.span.duration_s:
                    part = min(1.0, (called_s - step.arrival_s) / step.span.duration_s)
                self._schedule(now_s + part * self._work_seconds(step), self._call, called)
        self._go_on(now_s, step)

    def _go_on(self, now_s: float, step: Step) -> None:
        """Begin a step's work, or wait for its partners, once all awaited calls have ended."""
        missing = [n for n in step.awaited if self.missing[step.span.rank, n]]
        if missing:
            self.waiting[step.span.rank, missing[0]].append(step)
            return
        self.played[step].ready_s = now_s
        if not step.is_message:
            self.played[step].moved_s = now_s
            self._schedule(now_s + self._work_seconds(step), self._end, step)
        for partner in step.partners:
            played = self.played[partner]
            played.num_late -= 1
            if not played.num_late:
                played.moved_s = now_s
                self._schedule(now_s + partner.own_s, self._move, partner)

    def _work_seconds(self, step: Step) -> float:
        if step.span.kind in STEP_KINDS:
            return step.own_s * self.factors.get(step.span.rank, 1.0)
        return step.own_s

    def _move(self, now_s: float, step: Step) -> None:
        end_s = now_s
        rank = step.span.rank
        if self.network is not None and step.is_joint:
            end_s += self._joint_seconds(step.span, self.network)
        elif self.network is not None:
            card = self.cards.setdefault(self.network.card_of(rank), _Card(self.network))
            end_s = card.book(now_s, _sizes(step, self.network))
        self._schedule(end_s, self._end, step)

    def _joint_seconds(self, span: Span, network: Network) -> float:
        """Seconds over the link of a collective of all ranks, as a ring.

        Of S bytes it sends P - 1 messages of S, or 2 (P - 1) of S / P; half of a ring P - 1 of
        S / P.
        """
        if not span.num_bytes or (network.ranks_per_host or 0) >= self.num_ranks:
            return 0.0
        num_messages = len(span.messages)
        message_bytes = span.num_bytes / num_messages
        if num_messages == self.num_ranks - 1 and span.kind not in RING_KINDS:
            num_messages *= 2
            message_bytes /= self.num_ranks
        return num_messages * network.link.message_seconds(message_bytes)

    def _end(self, now_s: float, step: Step) -> None:
        self.played[step].end_s = now_s
        span = step.span
        if span.call:
            call = span.rank, span.call[0]
            self.missing[call] -= 1
            if not self.missing[call]:
                for waiting in self.waiting.pop(call, []):
                    self._go_on(now_s, waiting)
        lane = span.rank, span.lane
        self.next_index[lane] += 1
        self._free(now_s, lane)

    def _spans_of(self, step: Step) -> Iterator[Span]:
        span = step.span
        played = self.played[step]
        moved_s = played.end_s if span.kind == "wait" else played.moved_s
        if moved_s > played.began_s:
            late = None
            if step.is_message and not step.awaited:
                late = max(step.partners, key=lambda p: self.played[p].ready_s).span.rank
            yield Span(span.rank, "wait", played.began_s, moved_s, 0, late, span.lane)
        if span.kind != "wait":
            yield Span(
                span.rank, span.kind, moved_s, played.end_s, span.num_bytes, span.peer, span.lane
            )
