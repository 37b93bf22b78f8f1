"""The check of all-reduce through rank 0.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable
from functools import partial

from labkit import collectives
from labkit.costs.traffic import naive_all_reduce_cost
from workbook.exercises.grader import WORLD_SIZES, Case, Exercise, Target, Verdict, grade
from workbook.exercises.grader.exercise import DRAWN
from workbook.exercises.ring import reduced


def all_reduce(
    fn: Callable, *, op: str = "sum", world_sizes: tuple[int, ...] = WORLD_SIZES
) -> Verdict:
    """Grade ``fn(comm, tensor)``: the sum (or ``op="mean"``) over the ranks, in place.

    Target: all other ranks send one message to rank 0, which sends P - 1; each has S bytes.
    """
    exercise = Exercise(
        "naive.all_reduce",
        expected=partial(reduced, op),
        target=_target,
        same_bits=True,
        library=collectives.naive_all_reduce,
        drawn_size=DRAWN,
    )
    return grade(fn, exercise, world_sizes)


def _target(rank: int, case: Case) -> Target:
    peers = {0} if rank else range(1, case.world_size)
    return case.target(naive_all_reduce_cost, rank, peers=peers)
