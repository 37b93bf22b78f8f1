"""Collectives in which one rank serves all others: the obvious first solutions.

An all-reduce through one rank is what the ring improves. ``gather`` and ``scatter`` move different
bytes for every rank, all over the root's link: a tree would save steps, but send most bytes
several times.

Symbols: P ranks, S bytes of one rank's tensor.
"""

import torch

from labkit.collectives.common import (
    Reduction,
    check_fits,
    check_one_per_rank,
    check_root,
    collective_in_place,
    new_like,
)
from labkit.engine.comm.comm import Comm


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
            total = flat.to(reduction.accumulate_dtype)
            incoming = torch.empty_like(flat)
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


def gather(comm: Comm, tensor: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
    """Gather every rank's ``tensor`` (any shape and dtype, the same on every rank) on the root.

    Returns:
        On the root P new tensors, in the order of the ranks; None on the others.

    Steps P - 1 on the root, which sends nothing; every other rank sends one message of S bytes.
    """
    check_root(comm, root)
    with comm.collective("gather", tensor, f"to rank {root}"), comm.span("gather"):
        if comm.rank != root:
            comm.send(tensor, root)
            return None
        gathered = [new_like(tensor) for _ in range(comm.world_size)]
        gathered[root].copy_(tensor.detach())
        for src in range(comm.world_size):
            if src != root:
                comm.recv(gathered[src], src)
        return gathered


def scatter(
    comm: Comm, tensors: list[torch.Tensor] | None, out: torch.Tensor, root: int = 0
) -> torch.Tensor:
    """Send ``tensors[r]`` of the root to rank r, for all r, into ``out``; return ``out``.

    The tensors, of which other ranks need none, have the shape and dtype of ``out``. The root
    sends P - 1 messages of S bytes in as many steps, the others nothing.
    """
    check_root(comm, root)
    option = f"from rank {root}"
    with collective_in_place(comm, "scatter", out, option, kind="scatter") as flat:
        if comm.rank != root:
            comm.recv(flat, root)
            return out
        shares = tensors or []
        check_one_per_rank(comm, shares, "tensors to scatter")
        for rank, share in enumerate(shares):
            check_fits(share, out, f"the share of rank {rank}")
        for dst, share in enumerate(shares):
            if dst != root:
                comm.send(share.reshape(-1), dst)
        flat.copy_(shares[root].detach().reshape(-1))
    return out
