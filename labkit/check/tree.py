"""The check of all-reduce by recursive doubling.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable
from functools import partial

from labkit import collectives
from labkit.check.grading import Case, Exercise, Target, Verdict, grade
from labkit.check.grading.exercise import DRAWN
from labkit.check.ring import reduced
from labkit.costs.traffic import tree_all_reduce_cost

# On two and four ranks, going through the distances 1, 2, 3, ... looks like doubling them.
_WORLD_SIZES = (2, 8)


def all_reduce(
    fn: Callable, *, op: str = "sum", world_sizes: tuple[int, ...] = _WORLD_SIZES
) -> Verdict:
    """Grade ``fn(comm, tensor)``: the sum (or ``op="mean"``) over the ranks, in place.

    Target per rank, where P is a power of two: log2 P exchanges of S bytes, each with the rank
    whose number differs in one bit. For any other P only the result is judged.
    """
    exercise = Exercise(
        "tree.all_reduce",
        expected=partial(reduced, op),
        target=_target,
        same_bits=True,
        library=collectives.tree_all_reduce,
        drawn_size=DRAWN,
    )
    return grade(fn, exercise, world_sizes)


def _target(rank: int, case: Case) -> Target:
    rounds = case.world_size.bit_length() - 1
    if 2**rounds != case.world_size:
        return Target()
    peers = (rank ^ 2**k for k in range(rounds))
    return case.target(tree_all_reduce_cost, rank, peers=peers)
