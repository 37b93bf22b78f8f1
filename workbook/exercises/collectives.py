"""Page 00: gather, a collective with a root.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable

from labkit import collectives
from labkit.costs.traffic import gather_cost
from workbook.exercises.grader import WORLD_SIZES, Exercise, Verdict, grade
from workbook.exercises.grader.exercise import DRAWN, tensor_and_root


def gather(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor, root)``: returns all ranks' tensors on the root, else None.

    The list is in the order of the ranks. Target: every rank but the root sends its tensor to the
    root, once; the root sends nothing.
    """
    exercise = Exercise(
        "collectives.gather",
        lambda rank, case: (
            [case.tensor(r) for r in range(case.world_size)] if rank == case.root else None
        ),
        signature="comm, tensor, root",
        inputs=tensor_and_root,
        written=None,
        target=lambda rank, case: case.target(
            gather_cost, rank, case.root, peers={case.root} - {rank}
        ),
        library=collectives.gather,
        drawn_size=DRAWN,
        root_name="root",
    )
    return grade(fn, exercise, world_sizes)
