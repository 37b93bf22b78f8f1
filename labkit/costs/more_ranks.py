"""The lanes of a recorded run as they would be on another number of ranks.

Only for data parallelism whose messages are those of a ring, or of an all-reduce in shared memory:
``labkit.schedules.ring`` makes these for any number of ranks. A rank takes the work of a recorded
one, and computes in proportion to its samples.

Symbols: P ranks recorded, N predicted.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from labkit.costs.replay import Lanes, Network, Step, lanes_of, match
from labkit.schedules.ring import chunk_bounds, ring_share_only, ring_share_reduce
from labkit.tracing.spans import STEP_KINDS, Trace

_RINGS = {"share_reduce": ring_share_reduce, "share_only": ring_share_only}
# What ranks do is known for any number of them.
_TECHNIQUES = ("ring_all_reduce", "ddp", "sharded")


def on_ranks(trace: Trace, num_ranks: int, network: Network | None) -> Lanes:
    """The steps of each (rank, lane) on ``num_ranks`` ranks, from the first training step on.

    ``network`` is that of the recorded run.

    Raises:
        ValueError: the schedule cannot be made for another number of ranks.
    """
    technique = trace.about.get("strategy")
    if technique not in _TECHNIQUES:
        raise ValueError(
            f"ranks {num_ranks}: only {', '.join(_TECHNIQUES)} have a schedule for another "
            f"number of ranks; this is a trace of {technique or 'a function, not of training'}"
        )
    begins_s = {rank: trace.of(rank, "data")[0].start_s for rank in trace.ranks}
    steps_only = tuple(span for span in trace.spans if span.start_s >= begins_s[span.rank])
    lanes = lanes_of(replace(trace, spans=steps_only), network)
    old_ranks = len(trace.ranks)
    _check_kinds(lanes, old_ranks, num_ranks)
    samples = _samples(trace.about["batch_size"], old_ranks)
    new_samples = _samples(trace.about["batch_size"], num_ranks)
    new_lanes: Lanes = {}
    for rank in range(num_ranks):
        template = rank % old_ranks
        ratio = new_samples[rank] / samples[template]
        work = {lane: steps for (owner, lane), steps in lanes.items() if owner == template}
        maker = _Maker(rank, old_ranks, num_ranks, ratio)
        for lane, steps in maker.lanes(work).items():
            new_lanes[rank, lane] = steps
    match(new_lanes)
    return new_lanes


def _samples(batch_size: int, num_ranks: int) -> list[int]:
    return [end - start for start, end in chunk_bounds(batch_size, num_ranks)]


def _check_kinds(lanes: Lanes, old_ranks: int, num_ranks: int) -> None:
    """Raise ValueError for messages that are no ring's, or samples that no rank computes."""
    kinds = set()
    for steps in lanes.values():
        for step in steps:
            if step.is_message and not step.is_joint and step.span.kind not in _RINGS:
                kinds.add(step.span.kind)
    if kinds:
        raise ValueError(
            f"ranks {num_ranks}: the trace of {old_ranks} ranks has messages of kind "
            f"{', '.join(sorted(kinds))}, which are not made for another number of ranks"
        )


class _Maker:
    """Makes the lanes of one rank from those of a recorded one."""

    def __init__(self, rank: int, old_ranks: int, num_ranks: int, ratio: float):
        self.rank = rank
        self.old_ranks = old_ranks
        self.num_ranks = num_ranks
        self.ratio = ratio

    def lanes(self, work: dict[int, list[Step]]) -> dict[int, list[Step]]:
        """The rank's steps by lane."""
        # Collectives have one order on all ranks, whichever thread carries them out.
        starts = []
        for lane, steps in work.items():
            for first, _ in self._collectives(steps):
                starts.append((steps[first].came_s, lane, first))
        numbers = {(lane, first): n for n, (_, lane, first) in enumerate(sorted(starts))}
        new_first: dict[int, Step] = {}
        new_lanes: dict[int, list[Step]] = {}
        for lane, steps in work.items():
            ends = dict(self._collectives(steps))
            row = new_lanes[lane] = []
            index = 0
            while index < len(steps):
                end = ends.get(index, index + 1)
                made = self._copies(steps[index:end], numbers.get((lane, index)))
                new_first[id(steps[index])] = made[0]
                row += made
                index = end
        for steps in work.values():
            for step in steps:
                for called_s, called in step.calls:
                    new_first[id(step)].calls.append((called_s, new_first[id(called)]))
        return new_lanes

    def _collectives(self, steps: list[Step]) -> Iterator[tuple[int, int]]:
        """The first step of each half of a ring, or meeting, and the one behind its last."""
        index = 0
        while index < len(steps):
            first = index
            index += 1
            if not steps[first].is_message:
                continue
            if not steps[first].is_joint:
                missing = self.old_ranks - 2
                while missing:
                    missing -= steps[index].is_message
                    index += 1
            yield first, index

    def _copies(self, steps: list[Step], number: int | None) -> list[Step]:
        """One step of another rank, or the steps of its ``number``-th collective, as ours."""
        first = steps[0]
        if number is None:
            scale = self.ratio if first.span.kind in STEP_KINDS else 1.0
            return [self._copy(first, own_s=first.own_s * scale)]
        key: Any = number
        if first.is_joint:
            count = len(first.span.messages)
            one_hop = count == self.old_ranks - 1
            tensor_bytes = first.span.num_bytes / count
            tensor_bytes *= 1 if one_hop else self.old_ranks
            new_count = (1 if one_hop else 2) * (self.num_ranks - 1) if first.span.num_bytes else 1
            num_bytes = round(new_count * tensor_bytes / (1 if one_hop else self.num_ranks))
            messages = ((-1, -1, key),) * new_count
            scale = num_bytes / first.span.num_bytes if first.span.num_bytes else 1.0
            return [self._copy(first, first.own_s * scale, num_bytes, messages)]
        sent = [step for step in steps if step.is_message]
        added = [step for step in steps if not step.is_message]
        part = self.old_ranks / self.num_ranks
        num_bytes = round(part * sum(step.span.num_bytes for step in sent) / len(sent))
        own_s = sum(step.own_s for step in sent) / len(sent)
        copies = []
        for hop in _RINGS[first.span.kind](self.rank, self.num_ranks):
            there = (self.rank, hop.dst, (key, hop.step))
            here = (hop.src, self.rank, (key, hop.step))
            message = self._copy(first, own_s, num_bytes, (there, here))
            if copies:
                message.gap_s = 0.0
                message.awaited = set()
                message.is_called = False
                if added:
                    added_s = part * sum(step.own_s for step in added) / len(added)
                    copies.append(self._copy(added[0], added_s))
            copies.append(message)
        return copies

    def _copy(
        self, step: Step, own_s: float, num_bytes: int = 0, messages: tuple[Any, ...] | None = None
    ) -> Step:
        """A step of our rank; ``messages`` None: those of its calls."""
        if messages is None:
            messages = tuple((self.rank, self.rank, number) for number in step.awaited)
            if step.span.kind != "wait":
                messages = ()
        span = replace(step.span, rank=self.rank, num_bytes=num_bytes, messages=messages)
        fields = {"awaited": set(step.awaited), "is_called": step.is_called}
        return Step(span, step.came_s, step.gap_s, own_s, **fields)
