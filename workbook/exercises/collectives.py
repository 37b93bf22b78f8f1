"""Page 00: gather, a collective with a root.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable

from labkit import collectives
from labkit.costs.traffic import gather_cost
from workbook.exercises.grader import WORLD_SIZES, Case, Exercise, Verdict, grade
from workbook.exercises.grader.exercise import DRAWN


def gather(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor, root)``: returns all ranks' tensors on the root, else None.

    The list is in the order of the ranks. Target: every rank but the root sends its tensor to the
    root, once; the root sends nothing.
    """

    def root(case: Case) -> int:
        return (case.size + case.call) % case.world_size

    exercise = Exercise(
        "collectives.gather",
        lambda rank, case: (
            [case.tensor(r) for r in range(case.world_size)] if rank == root(case) else None
        ),
        signature="comm, tensor, root",
        inputs=lambda rank, case: (case.tensor(rank), root(case)),
        written=None,
        target=lambda rank, case: case.target(
            gather_cost, rank, root(case), peers={root(case)} - {rank}
        ),
        library=collectives.gather,
        drawn_size=DRAWN,
        special=lambda case: f"root {root(case)}",
    )
    return grade(fn, exercise, world_sizes)
