"""All-reduce through one rank: the obvious first solution, which the ring improves.

Symbols: P ranks, S bytes.
"""

import torch

from labkit.collectives.common import collective_in_place
from labkit.collectives.reduction import Reduction
from labkit.comm.comm import Comm


def naive_all_reduce(comm: Comm, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Reduce ``tensor`` over all ranks, in place: all send to rank 0, which sends the result back.

    Args:
        tensor: any shape, the same on every rank; returned.
        op: an operation of ``Reduction``: "sum", "mean", "max", ...
            16-bit floats are summed in float32.

    Rank 0 moves 2 (P - 1) S bytes while the others wait: it is the bottleneck, and more so with
    more ranks. Steps 2 (P - 1); rank 0 sends (P - 1) S bytes, every other rank S.
    """
    reduction = Reduction.of(op, tensor)
    with collective_in_place(comm, "naive_all_reduce", tensor, op) as flat:
        if comm.rank == 0:
            total, incoming = flat.to(reduction.wide), torch.empty_like(flat)
            for src in range(1, comm.world_size):
                comm.recv(incoming, src)
                reduction.combine(total, incoming, out=total)
            flat.copy_(reduction.finish(total, comm.world_size))
            for dst in range(1, comm.world_size):
                comm.send(flat, dst)
        else:
            comm.send(flat, 0)
            comm.recv(flat, 0)
    return tensor
