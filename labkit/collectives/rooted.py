"""Collectives with a root: one rank sends to all ranks, or receives from all ranks.

``broadcast`` and ``reduce`` move S bytes to or from every rank, and any rank that has them can
pass them on (or add them up): a binomial tree needs ceil(log2 P) steps. ``gather`` and ``scatter``
move different bytes for every rank, and all of them cross the root's link. A tree would save
steps, but send most bytes several times: here the root simply serves one rank after another.

Symbols: P ranks, S bytes of one rank's tensor. Source: Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005), section 4.
"""

import torch
from torch import Tensor

import labkit.collectives.common as common
from labkit.collectives.reduction import Reduction
from labkit.comm.comm import Comm
from labkit.schedules.tree import binomial_broadcast, binomial_reduce


def broadcast(comm: Comm, tensor: Tensor, root: int = 0) -> Tensor:
    """Copy the root's ``tensor`` to all ranks, in place.

    Args:
        tensor: any shape and dtype, the same on every rank; returned.
        root: the rank whose values are copied.

    Steps ceil(log2 P). All ranks together send P - 1 messages of S bytes; the root sends
    ceil(log2 P) of them.
    """
    common.check_root(comm, root)
    where = f"from rank {root}"
    with common.collective_in_place(comm, "broadcast", tensor, where, "broadcast") as flat:
        for step in binomial_broadcast(comm.rank, comm.world_size, root):
            common.transfer(comm, step, flat, flat)
    return tensor


def reduce(comm: Comm, tensor: Tensor, root: int = 0, op: str = "sum") -> Tensor:
    """Reduce ``tensor`` over all ranks; the root gets the result, in place.

    Args:
        tensor: any shape, the same shape and dtype on every rank; returned. On the other ranks it
            keeps its values.
        root: the rank that gets the result.
        op: an operation of ``Reduction``: "sum", "mean", "max", ....

    Steps ceil(log2 P). Every rank but the root sends one message of S bytes (twice that for
    16-bit floats, whose partial sums travel as float32).
    """
    common.check_root(comm, root)
    reduction = Reduction.of(op, tensor)
    where = f"{op} to rank {root}"
    with common.collective_in_place(comm, "reduce", tensor, where, "reduce") as flat:
        partial = flat.to(reduction.wide, copy=True)
        incoming = torch.empty_like(partial)
        for step in binomial_reduce(comm.rank, comm.world_size, root):
            common.transfer(comm, step, partial, incoming)
            if step.src is not None:
                reduction.combine(partial, incoming, out=partial)
        if comm.rank == root:
            flat.copy_(reduction.finish(partial, comm.world_size))
    return tensor


def gather(comm: Comm, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
    """Gather every rank's ``tensor`` on the root.

    Args:
        tensor: any shape and dtype, the same on every rank; not changed.
        root: the rank that gets the tensors.

    Returns:
        On the root P new tensors, in the order of the ranks; None on the others.

    Steps P - 1 on the root, which sends nothing; every other rank sends one message of S bytes.
    """
    common.check_root(comm, root)
    with comm.collective("gather", tensor, f"to rank {root}"), comm.span("gather"):
        if comm.rank != root:
            comm.send(tensor, root)
            return None
        found = [common.new_like(tensor) for _ in range(comm.world_size)]
        found[root].copy_(tensor.detach())
        for src in range(comm.world_size):
            if src != root:
                comm.recv(found[src], src)
        return found


def scatter(comm: Comm, tensors: list[Tensor] | None, out: Tensor, root: int = 0) -> Tensor:
    """Send ``tensors[r]`` of the root to rank r, for all r.

    Args:
        tensors: on the root P tensors of the shape and dtype of ``out``, in the order of the
            ranks; None on the others.
        out: filled in place with this rank's share; returned. The same shape on every rank.
        root: the rank that has ``tensors``.

    The root sends P - 1 messages of S bytes in as many steps, the others nothing.

    Raises:
        ValueError: the root does not have one tensor per rank, or one does not fit ``out``.
    """
    common.check_root(comm, root)
    where = f"from rank {root}"
    with common.collective_in_place(comm, "scatter", out, where, "scatter") as flat:
        if comm.rank == root:
            shares = tensors or []
            common.check_one_per_rank(comm, shares, "tensors to scatter")
            for rank, share in enumerate(shares):
                common.check_fits(share, out, f"the share of rank {rank}")
            for dst, share in enumerate(shares):
                if dst != root:
                    comm.send(share.reshape(-1), dst)
            flat.copy_(shares[root].detach().reshape(-1))
        else:
            comm.recv(flat, root)
    return out
