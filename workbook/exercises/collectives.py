"""Page 00: gather, a collective with a root."""

from torch import Tensor

from labkit import collectives
from labkit.costs.traffic import gather_cost
from workbook.exercises.grader import Case, Check


def _root(case: Case) -> int:
    return (case.size + case.call) % case.world_size


def _gathered(rank: int, case: Case) -> list[Tensor] | None:
    if rank != _root(case):
        return None
    return [case.tensor(r) for r in range(case.world_size)]


# fn(comm, tensor, root): the list of all ranks' tensors on the root, else None.
gather = Check(
    "collectives.gather",
    _gathered,
    signature="comm, tensor, root",
    inputs=lambda rank, case: (case.tensor(rank), _root(case)),
    written=None,
    target=lambda r, case: case.target(gather_cost, r, _root(case), peers={_root(case)} - {r}),
    library=collectives.gather,
    special=lambda case: f"root {_root(case)}",
)
