"""Sharded data parallelism: what a rank does with each unit's parameters and gradients, in order.

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
    """What a rank does next: with unit ``number`` for forward and backward, else with that flat.

    ``gather`` begins to collect its chunks, ``wait`` waits for them, ``free`` keeps only the own
    one; ``begin`` makes gradients, zeros; ``reduce`` begins to sum them, ``finish`` waits for it.
    """

    kind: str
    number: int


def first_uses(uses: Uses) -> list[list[int]]:
    """By unit, the flats that no unit before it uses: backward completes their gradients there."""
    before = (set().union(*uses[:unit]) for unit in range(len(uses)))
    return [[flat for flat in flats if flat not in seen] for flats, seen in zip(uses, before)]


def sharded_pass(
    stage: int, uses: Uses, trained: Collection[int], backward: bool = True
) -> Iterator[Instruction]:
    """The instructions of a forward pass and, unless it is an evaluation, of its backward.

    ``trained`` are the flats that get gradients. Backward ends with the first unit that uses one.
    """
    # Two units behind the last one make the ends of the loop like its middle.
    owned = [[flat for flat in flats if flat in trained] for flats in first_uses(uses)] + [[], []]
    first = next((n for n, flats in enumerate(uses) if {*flats} & {*trained}), len(uses))
    there = [Instruction("forward", n) for n in range(len(uses))]
    back = [Instruction("backward", n) for n in range(len(uses) - 1, first - 1, -1)] * backward
    whole: list[int] = []
    for place, visit in enumerate(visits := [*there, *back]):
        # Forward has left all units when backward begins.
        turns, n = place == len(there), visit.number
        for flat in [flat for flat in whole if turns or flat not in uses[n]]:
            # What was gathered ahead is for this unit.
            whole.remove(flat)
            yield Instruction("free", flat)
        if visit.kind == "backward":
            yield from (Instruction("finish", flat) for flat in owned[n + 2])
            yield from (Instruction("reduce", flat) for flat in owned[n + 1])
        if stage == 3:
            ahead = visits[place + 1 : place + 2] if place + 1 != len(there) else []
            wanted = dict.fromkeys(f for one in (visit, *ahead) for f in uses[one.number])
            for flat in wanted:
                if flat not in whole:
                    whole.append(flat)
                    yield Instruction("gather", flat)
            yield from (Instruction("wait", flat) for flat in uses[n])
        if visit.kind == "backward":
            yield from (Instruction("begin", flat) for flat in owned[n])
        yield visit
    yield from (Instruction("free", flat) for flat in whole)
    if back:
        yield from (Instruction("finish", flat) for flat in owned[first + 1])
        for kind in ("reduce", "finish"):
            yield from (Instruction(kind, flat) for flat in owned[first])
