"""Sharded data parallelism: the order in which a rank gathers, frees and reduces its flats.

A unit is a layer, or a few. Its parameters form **flats**, tensors of which each rank has a chunk.
Stage 3 gathers the flats of the next unit while this one computes, and frees them when the unit is
done. All stages share-reduce a unit's gradients while backward is in the unit before it. With
three units, of one flat each, a step of stage 3 is

    gather 0, gather 1, wait 0, forward 0, free 0, gather 2, wait 1, forward 1, free 1,
    wait 2, forward 2, free 2,
    gather 2, gather 1, wait 2, begin 2, backward 2, free 2,
    reduce 2, gather 0, wait 1, begin 1, backward 1, free 1,
    finish 2, reduce 1, wait 0, begin 0, backward 0, free 0, finish 1, reduce 0, finish 0

Stages 1 and 2 leave out gather, wait and free. Source: Zhao et al., "PyTorch FSDP: experiences on
scaling fully sharded data parallel" (2023), section 3.3, with their backward prefetch.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

# By unit, the flats that its layers use.
Uses = Sequence[Sequence[int]]


class Instruction(NamedTuple):
    """The next work of a rank: on unit ``number`` for forward and backward, else on that flat.

    ``gather`` begins the all-gather (share-only) of its shards, ``wait`` waits for it, ``free``
    keeps only the rank's own; ``begin`` makes gradients, zeros; ``reduce`` begins their
    reduce-scatter (share-reduce), ``finish`` waits for it.
    """

    kind: str
    number: int


def first_uses(uses: Uses) -> list[list[int]]:
    """Flats by unit that no unit before it uses: backward completes their gradients there."""
    used_before = set[int]()
    by_unit = []
    for flats in uses:
        by_unit.append([flat for flat in flats if flat not in used_before])
        used_before.update(flats)
    return by_unit


def sharded_pass(
    stage: int, uses: Uses, trained: Collection[int], backward: bool = True
) -> Iterator[Instruction]:
    """The instructions of a forward pass and, unless it is an evaluation, of its backward.

    ``trained`` are the flats that get gradients. Backward ends with the first unit that uses one.
    """
    # By unit, the flats whose gradients are complete when backward has left it.
    completed_by_unit = []
    for flats in first_uses(uses):
        completed_by_unit.append([flat for flat in flats if flat in trained])
    # Two units behind the last one make the ends of the loop like its middle.
    completed_by_unit += [[], []]
    trained_units = [unit for unit, flats in enumerate(uses) if set(flats) & set(trained)]
    has_backward = backward and bool(trained_units)
    visits = [Instruction("forward", unit) for unit in range(len(uses))]
    if has_backward:
        units = reversed(range(trained_units[0], len(uses)))
        visits += [Instruction("backward", unit) for unit in units]
    gathered: list[int] = []
    for position, (kind, unit) in enumerate(visits):
        # Forward has left all units when backward begins.
        is_turn = position == len(uses)
        # What was gathered ahead is for this unit.
        stale = [flat for flat in gathered if is_turn or flat not in uses[unit]]
        gathered = [flat for flat in gathered if flat not in stale]
        yield from _for_each(stale, "free")
        if kind == "backward":
            yield from _for_each(completed_by_unit[unit + 2], "finish")
            yield from _for_each(completed_by_unit[unit + 1], "reduce")
        if stage == 3:
            needed = [*uses[unit]]
            if position + 1 not in (len(uses), len(visits)):
                needed += uses[visits[position + 1].number]
            missing = [flat for flat in dict.fromkeys(needed) if flat not in gathered]
            gathered += missing
            yield from _for_each(missing, "gather")
            yield from _for_each(uses[unit], "wait")
        if kind == "backward":
            yield from _for_each(completed_by_unit[unit], "begin")
        yield Instruction(kind, unit)
    yield from _for_each(gathered, "free")
    if has_backward:
        last_unit = trained_units[0]
        yield from _for_each(completed_by_unit[last_unit + 1], "finish")
        yield from _for_each(completed_by_unit[last_unit], "reduce")
        yield from _for_each(completed_by_unit[last_unit], "finish")


def _for_each(flats: Sequence[int], kind: str) -> list[Instruction]:
    return [Instruction(kind, flat) for flat in flats]
