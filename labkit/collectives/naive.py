"""All-reduce through one rank: the first idea everyone has, and what the ring is better than.

Symbols: P ranks, S bytes.
"""

import torch

from labkit.comm import Comm


def naive_all_reduce(comm: Comm, tensor: torch.Tensor) -> torch.Tensor:
    """Sum ``tensor`` over all ranks, in place: everyone sends to rank 0, rank 0 sends back.

    Args:
        comm: this rank's Comm.
        tensor: any shape, the same on every rank; returned.

    Rank 0 moves 2 (P - 1) S bytes while the others wait for it: it is the bottleneck, and it gets
    worse with every rank. Steps 2 (P - 1); rank 0 sends (P - 1) S bytes, every other rank S.
    """
    with torch.no_grad(), comm.span("all_reduce"):
        if comm.rank == 0:
            incoming = torch.empty_like(tensor)
            for src in range(1, comm.world_size):
                comm.recv(incoming, src)
                tensor += incoming
            for dst in range(1, comm.world_size):
                comm.send(tensor, dst)
        else:
            comm.send(tensor, 0)
            comm.recv(tensor, 0)
    return tensor
