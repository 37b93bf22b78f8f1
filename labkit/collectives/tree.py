"""In log2 P steps: all-reduce of small tensors, and a barrier made of messages.

Symbols: P ranks, S bytes. Sources: recursive doubling, Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005), section 4; Hensgen, Finkel
and Manber, "Two algorithms for barrier synchronization" (1988), the dissemination barrier.
"""

import torch

from labkit import gpus
from labkit.collectives.common import collective_in_place, transfer
from labkit.collectives.reduction import Reduction
from labkit.comm.comm import Comm
from labkit.schedules.tree import dissemination, recursive_doubling, recursive_doubling_return


def tree_all_reduce(comm: Comm, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Reduce ``tensor`` over all ranks, in place: pairs, then pairs of pairs, then all.

    Args:
        tensor: any shape and size; the same shape and dtype on every rank. Returned.
        op: an operation of ``Reduction``: "sum", "mean", "max", ....

    In every step a rank exchanges all it has with a partner, and both combine the two. Steps and
    messages log2 P, bytes log2 P x S on every rank. If P is not a power of two, the ranks beyond
    the largest power send their values to others first and get the result at the end: 2 more
    steps. Partial sums of 16-bit floats are sent as float32, twice the bytes; the result is not.

    Partners combine in the same order, the lower rank's values first, so all ranks end with the
    same bits.
    """
    reduction = Reduction.of(op, tensor)
    with collective_in_place(comm, "tree_all_reduce", tensor, op) as flat:
        partial = flat.to(reduction.wide)
        incoming = torch.empty_like(partial)
        for step in recursive_doubling(comm.rank, comm.world_size):
            transfer(comm, step, partial, incoming)
            if step.src is not None:
                pair = (partial, incoming) if comm.rank < step.src else (incoming, partial)
                reduction.combine(*pair, out=partial)
        flat.copy_(reduction.finish(partial, comm.world_size))
        for step in recursive_doubling_return(comm.rank, comm.world_size):
            transfer(comm, step, flat, flat)
    return tensor


def dissemination_barrier(comm: Comm) -> None:
    """Return when every rank has called this: ceil(log2 P) steps, a message of one byte in each.

    In step s a rank tells rank + 2^s (mod P) that it has arrived itself, and so have all the ranks
    that it has heard of: 1 rank after the first step, then 3, then 7. After the last step it has
    heard of all ranks, directly or through others.
    """
    token = torch.zeros(1, dtype=torch.uint8, device=comm.device)
    heard = torch.empty_like(token)
    with comm.collective("dissemination_barrier"), comm.span("barrier"):
        for step in dissemination(comm.rank, comm.world_size):
            transfer(comm, step, token, heard)
        # On NCCL the messages are only queued so far, and this rank would leave before the others
        # have come.
        gpus.synchronize(comm.device)
