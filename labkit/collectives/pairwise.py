"""All-to-all: every rank has a different tensor for every other rank.

Symbols: P ranks, S bytes of one tensor. Source: pairwise exchange, Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005), section 4.
"""

from torch import Tensor

from labkit.collectives.common import check_fits, check_one_per_rank, new_like, transfer
from labkit.comm.comm import Comm
from labkit.comm.tensors import check_apart
from labkit.schedules.tree import pairwise_exchange


def all_to_all(comm: Comm, tensors: list[Tensor], out: list[Tensor] | None = None) -> list[Tensor]:
    """Send ``tensors[r]`` to rank r, for all r, and receive one tensor from each rank.

    Args:
        tensors: P tensors of one dtype; not changed.
        out: P tensors to receive into, from rank 0 to P - 1; returned. Needed where shapes differ,
            since a rank cannot know the shapes that the others send; by default new tensors. They
            must share memory neither with each other nor with ``tensors``.

    In step s every rank sends to rank + s and receives from rank - s (mod P), so that no rank gets
    several messages at once. Steps and messages P - 1, bytes (P - 1) S per rank if shapes are
    equal.
    """
    check_one_per_rank(comm, tensors, "tensors to send")
    if out is None:
        out = [new_like(tensors[0]) for _ in tensors]
    check_one_per_rank(comm, out, "tensors to receive into")
    check_fits(tensors[comm.rank], out[comm.rank], "the tensor for this rank itself")
    check_apart(
        {f"out[{rank}]": tensor for rank, tensor in enumerate(out)},
        {f"tensors[{rank}]": tensor for rank, tensor in enumerate(tensors)},
    )
    # Announced without a tensor: the shapes may differ from rank to rank.
    with comm.collective("all_to_all"), comm.span("all_to_all"):
        for step in pairwise_exchange(comm.rank, comm.world_size):
            assert step.dst is not None
            assert step.src is not None
            transfer(comm, step, tensors[step.dst], out[step.src])
        out[comm.rank].detach().copy_(tensors[comm.rank].detach())
    return out
