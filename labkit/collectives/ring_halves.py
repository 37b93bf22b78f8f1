"""The two halves of the ring as collectives: reduce-scatter and all-gather.

After ``share_reduce`` rank r owns chunk (r + 1) mod P, so rank r's tensor takes that place.

Symbols: P ranks, S bytes of one rank's tensor. Source: Patarasuk and Yuan (2009), section 3.
"""

import torch

from labkit.collectives.common import check_one_per_rank, new_like
from labkit.collectives.reduction import Reduction
from labkit.collectives.ring import share_only, share_reduce
from labkit.comm.comm import Comm
from labkit.schedules.ring import owned_chunk


def all_gather(comm: Comm, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Give all ranks every rank's ``tensor``.

    Args:
        tensor: any shape and dtype, the same on every rank; not changed.

    Returns:
        P new tensors, in the order of the ranks.

    Steps and messages P - 1, bytes (P - 1) S on every rank.
    """
    ranks = range(comm.world_size)
    with comm.collective("all_gather", tensor):
        chunks = [new_like(tensor) for _ in ranks]
        chunks[owned_chunk(comm.rank, comm.world_size)].copy_(tensor.detach())
        share_only(comm, chunks)
    return [chunks[owned_chunk(rank, comm.world_size)] for rank in ranks]


def reduce_scatter(comm: Comm, tensors: list[torch.Tensor], op: str = "sum") -> torch.Tensor:
    """Reduce P tensors over all ranks; rank r gets the result of ``tensors[r]``.

    Args:
        tensors: P tensors of one dtype, the same shapes on every rank; not changed.
        op: an operation of ``Reduction``: "sum", "mean", "max", ....

    Returns:
        A new tensor of the shape of ``tensors[rank]``.

    Steps and messages P - 1, bytes (P - 1) S on every rank if the shapes are equal (twice that
    for 16-bit floats, whose partial sums travel as float32).
    """
    check_one_per_rank(comm, tensors, "tensors to reduce")
    Reduction.of(op, tensors[0])
    with comm.collective("reduce_scatter", tensors[0], op):
        # Rank c - 1 owns chunk c; index -1 is the last rank's.
        chunks = [_copy_of(tensors[chunk - 1]) for chunk in range(comm.world_size)]
        share_reduce(comm, chunks, op)
    return chunks[owned_chunk(comm.rank, comm.world_size)]


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return new_like(tensor).copy_(tensor.detach())
