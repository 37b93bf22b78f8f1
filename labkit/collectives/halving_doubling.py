"""All-reduce by halving and doubling: few messages, as a tree's, and few bytes, as a ring's.

Symbols: P ranks, S bytes. Source: Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH" (2005), section 4.5. gloo: ``allreduce_halving_doubling``.
"""

import torch

from labkit.collectives.common import Reduction, collective_in_place, transfer
from labkit.engine.comm.comm import Comm
from labkit.schedules.halving_doubling import recursive_halving
from labkit.schedules.ring import Blocks, chunk_bounds
from labkit.schedules.tree import fold, largest_power_of_two, recursive_doubling_return


def halving_doubling_all_reduce(comm: Comm, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Reduce ``tensor`` (any shape) over all ranks, in place: a reduce-scatter, an all-gather.

    Messages and steps 2 log2 P, bytes 2 (P - 1) / P x S on every rank. If P is not a power of two,
    the ranks beyond the largest power Q send their values to others first and get the result at
    the end: 2 more steps, and P becomes Q in the formulas. Partial sums of 16-bit floats travel
    as float32. One rank completes each block, so all ranks end with the same bits.
    """
    reduction = Reduction.of(op, tensor)
    bounds = chunk_bounds(tensor.numel(), largest_power_of_two(comm.world_size))

    def elements(blocks: Blocks) -> slice:
        first, end = blocks
        return slice(bounds[first][0], bounds[end - 1][1])

    with collective_in_place(comm, "halving_doubling_all_reduce", tensor, op) as flat:
        partial = flat.to(reduction.accumulate_dtype)
        for step in fold(comm.rank, comm.world_size):
            incoming = torch.empty_like(partial)
            transfer(comm, step, partial, incoming)
            if step.src is not None:
                reduction.combine(partial, incoming, out=partial)
        owned = slice(0, tensor.numel())
        halvings = list(recursive_halving(comm.rank, comm.world_size))
        for halving in halvings:
            owned = elements(halving.kept)
            incoming = torch.empty_like(partial[owned])
            comm.exchange(partial[elements(halving.sent)], halving.peer, incoming, halving.peer)
            reduction.combine(partial[owned], incoming, out=partial[owned])
        flat[owned] = reduction.finish(partial[owned], comm.world_size)
        for halving in reversed(halvings):
            complete = flat[elements(halving.kept)]
            comm.exchange(complete, halving.peer, flat[elements(halving.sent)], halving.peer)
        for step in recursive_doubling_return(comm.rank, comm.world_size):
            transfer(comm, step, flat, flat)
    return tensor
