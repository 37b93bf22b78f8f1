"""The lanes of a recorded run as they would be on another number of ranks.

Only for data parallelism whose messages are those of a ring, or of an all-reduce in shared memory:
these have formulas for any number of ranks. A rank takes the work of a recorded one, and computes
in proportion to its samples. Each half of a ring becomes one operation of all ranks.

Symbols: P ranks recorded, N predicted, S bytes of one rank's tensor.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from labkit.costs.replay import RING_KINDS, Lanes, Network, Step, lanes_of, match
from labkit.engine.tracing.spans import STEP_KINDS, Span, Trace
from labkit.schedules.ring import chunk_bounds

# Techniques whose ranks all do the same, however many there are.
_TECHNIQUES = ("ring_all_reduce", "ddp", "sharded")


def on_ranks(trace: Trace, num_ranks: int, network: Network | None) -> Lanes:
    """The steps of each (rank, lane) on ``num_ranks`` ranks, from the first training step on.

    ``network`` is that of the recorded run.

    Raises:
        ValueError: the messages for another number of ranks are not known, or a rank would have
            no samples.
    """
    technique = trace.about.get("strategy")
    if technique not in _TECHNIQUES:
        raise ValueError(
            f"ranks {num_ranks}: the messages on another number of ranks are known for "
            f"{', '.join(_TECHNIQUES)}; this is a trace of {technique or 'no training run'}"
        )
    if trace.about.get("compress") == "topk":
        raise ValueError(f"ranks {num_ranks}: with compress topk messages are no parts of a ring")
    if trace.about.get("sync_batch_norm"):
        raise ValueError(f"ranks {num_ranks}: sync_batch_norm has messages that are no ring's")
    old_ranks = len(trace.ranks)
    batch_size = trace.about["batch_size"]
    if batch_size < max(num_ranks, old_ranks):
        raise ValueError(
            f"ranks {num_ranks}: a batch of {batch_size} leaves a rank without samples"
        )
    if any(len(trace.of(rank, "data")) < 2 for rank in trace.ranks):
        raise ValueError(f"ranks {num_ranks}: the trace has one step: record two or more")
    begins_s = {rank: trace.of(rank, "data")[0].start_s for rank in trace.ranks}
    steps_only = tuple(span for span in trace.spans if span.start_s >= begins_s[span.rank])
    lanes = lanes_of(replace(trace, spans=steps_only), network)
    _check_kinds(lanes, num_ranks)
    samples = [end - start for start, end in chunk_bounds(batch_size, old_ranks)]
    new_lanes: Lanes = {}
    for rank, (start, end) in enumerate(chunk_bounds(batch_size, num_ranks)):
        template = rank % old_ranks
        recorded = {}
        for (owner, lane), steps in lanes.items():
            if owner == template:
                recorded[lane] = steps
        ratios = dict.fromkeys(STEP_KINDS, (end - start) / samples[template])
        if technique == "sharded":
            # Each rank updates its part of the parameters.
            ratios["update"] = old_ranks / num_ranks
        lanes_of_rank = _lanes_of_rank(
            rank, recorded, ratios, old_ranks=old_ranks, num_ranks=num_ranks
        )
        for lane, steps in lanes_of_rank.items():
            new_lanes[rank, lane] = steps
    match(new_lanes)
    return new_lanes


def _check_kinds(lanes: Lanes, num_ranks: int) -> None:
    """Raise ValueError for messages that are no ring's."""
    steps = itertools.chain.from_iterable(lanes.values())
    messages = [step for step in steps if step.is_message and not step.is_joint]
    kinds = sorted({step.span.kind for step in messages} - RING_KINDS)
    if kinds:
        raise ValueError(
            f"ranks {num_ranks}: the trace has messages of kind {', '.join(kinds)}, which are not "
            "known on another number of ranks"
        )


def _lanes_of_rank(
    rank: int,
    recorded: dict[int, list[Step]],
    ratios: dict[str, float],
    *,
    old_ranks: int,
    num_ranks: int,
) -> dict[int, list[Step]]:
    """The steps by lane of ``rank``, with the work of ``recorded`` ones."""
    operations = []
    for lane, steps in recorded.items():
        operations += [(lane, operation) for operation in _operations(steps, old_ranks)]
    # Collectives have one order on all ranks, whichever thread carries them out.
    operations.sort(key=lambda lane_and_steps: lane_and_steps[1][0].arrival_s)
    number = 0
    copy_of: dict[Step, Step] = {}
    new_lanes: dict[int, list[Step]] = {lane: [] for lane in recorded}
    for lane, operation in operations:
        first = operation[0]
        span = replace(first.span, rank=rank)
        own_s = first.own_s
        if first.is_message:
            number += 1
            span, own_s = _joint(span, number, operation, old_ranks=old_ranks, num_ranks=num_ranks)
        else:
            own_s *= ratios.get(span.kind, 1.0)
        copy_of[first] = replace(
            first, span=span, own_s=own_s, partners=[], awaited=set(first.awaited), calls=[]
        )
        new_lanes[lane].append(copy_of[first])
    for _, operation in operations:
        for step in operation:
            for called_s, called in step.calls:
                copy_of[operation[0]].calls.append((called_s, copy_of[called]))
    return new_lanes


def _operations(steps: Sequence[Step], num_ranks: int) -> Iterator[Sequence[Step]]:
    """Cut a lane into the P - 1 messages of each half of a ring, and any other single steps."""
    index = 0
    while index < len(steps):
        first = index
        begins_ring = steps[first].is_message and not steps[first].is_joint
        missing = num_ranks - 2 if begins_ring else 0
        index += 1
        while missing and index < len(steps):
            missing -= steps[index].is_message
            index += 1
        # What the last message has brought is added, too.
        while begins_ring and index < len(steps) and _is_addition(steps[index], steps[first]):
            index += 1
        yield steps[first:index]


def _is_addition(step: Step, message: Step) -> bool:
    """True if a step is work of the collective to which ``message`` belongs."""
    same_collective = step.span.kind == message.span.kind and step.span.call == message.span.call
    return same_collective and not step.is_message


def _joint(
    span: Span, number: int, steps: Sequence[Step], *, old_ranks: int, num_ranks: int
) -> tuple[Span, float]:
    """One span that stands for a collective of N ranks, and its seconds beyond the link."""
    own_s = sum(step.own_s for step in steps)
    num_bytes = sum(step.span.num_bytes for step in steps)
    if not num_bytes:
        return replace(span, messages=((-1, -1, number),)), own_s
    count = sum(len(step.span.messages) for step in steps if step.is_joint)
    # In one hop a rank sends S to each other one; else each message is a chunk of S / P.
    scale = (num_ranks - 1) / (old_ranks - 1)
    new_count = num_ranks - 1
    if count != old_ranks - 1:
        scale *= old_ranks / num_ranks
    if count > old_ranks - 1:
        new_count *= 2
    span = replace(span, messages=((-1, -1, number),) * new_count)
    return replace(span, num_bytes=round(scale * num_bytes)), own_s * scale
