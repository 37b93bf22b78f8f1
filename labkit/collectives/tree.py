"""Collectives in log2 P steps: trees (broadcast, reduce), recursive doubling (all-reduce).

And in P - 1 steps all-to-all, where every rank has a different tensor for every other rank.

Symbols: P ranks, S bytes. Source: Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH" (2005), section 4.
"""

from collections.abc import Iterable

import torch

from labkit.collectives.common import (
    Reduction,
    check_fits,
    check_one_per_rank,
    check_root,
    collective_in_place,
    new_like,
    transfer,
)
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.transport import check_apart, check_writable
from labkit.schedules.tree import (
    binomial_broadcast,
    binomial_reduce,
    pairwise_exchange,
    recursive_doubling,
    recursive_doubling_return,
)


def tree_all_reduce(comm: Comm, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Reduce ``tensor`` (any shape) over all ranks, in place: pairs, pairs of pairs, then all.

    In every step a rank exchanges all it has with a partner, and both combine the two. Steps and
    messages log2 P, bytes log2 P x S on every rank. If P is not a power of two, the ranks beyond
    the largest power send their values to others first and get the result at the end: 2 more
    steps. Partial sums of 16-bit floats are sent as float32, twice the bytes; the result is not.

    Partners combine in the same order, the lower rank's values first, so all ranks end with the
    same bits.
    """
    reduction = Reduction.of(op, tensor)
    with collective_in_place(comm, "tree_all_reduce", tensor, op) as flat:
        partial = flat.to(reduction.accumulate_dtype)
        incoming = torch.empty_like(partial)
        for step in recursive_doubling(comm.rank, comm.world_size):
            transfer(comm, step, partial, incoming)
            if step.src is not None:
                if comm.rank < step.src:
                    reduction.combine(partial, incoming, out=partial)
                else:
                    reduction.combine(incoming, partial, out=partial)
        flat.copy_(reduction.finish(partial, comm.world_size))
        for step in recursive_doubling_return(comm.rank, comm.world_size):
            transfer(comm, step, flat, flat)
    return tensor


def broadcast(comm: Comm, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Copy the root's ``tensor`` (any shape and dtype) to all ranks, in place.

    Steps ceil(log2 P). All ranks together send P - 1 messages of S bytes; the root sends
    ceil(log2 P) of them.
    """
    check_root(comm, root)
    option = f"from rank {root}"
    with collective_in_place(comm, "broadcast", tensor, option, kind="broadcast") as flat:
        for step in binomial_broadcast(comm.rank, comm.world_size, root):
            transfer(comm, step, flat, flat)
    return tensor


def broadcast_coalesced(comm: Comm, tensors: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's ``tensors`` to all ranks, in place: one ``broadcast`` per dtype.

    The bytes are those of a broadcast of each tensor, the messages are fewer.
    """
    tensors_by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if not tensor.is_contiguous():
            check_writable(tensor)
        tensors_by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in tensors_by_dtype.values():
        shapes = [tuple(tensor.shape) for tensor in same_dtype]
        with comm.collective("broadcast_coalesced", option=f"{same_dtype[0].dtype} {shapes}"):
            flat = torch.cat([tensor.detach().flatten() for tensor in same_dtype])
            broadcast(comm, flat)
        if comm.rank > 0:
            pieces = flat.split([tensor.numel() for tensor in same_dtype])
            for tensor, piece in zip(same_dtype, pieces):
                tensor.detach().copy_(piece.view_as(tensor))


def reduce(comm: Comm, tensor: torch.Tensor, root: int = 0, op: str = "sum") -> torch.Tensor:
    """Reduce ``tensor`` (any shape) over all ranks; the root gets the result, in place.

    On the other ranks it keeps its values. ``op``: see ``Reduction``.

    Steps ceil(log2 P). Every rank but the root sends one message of S bytes (twice that for
    16-bit floats, whose partial sums travel as float32).
    """
    check_root(comm, root)
    reduction = Reduction.of(op, tensor)
    option = f"{op} to rank {root}"
    with collective_in_place(comm, "reduce", tensor, option, kind="reduce") as flat:
        partial = flat.to(reduction.accumulate_dtype, copy=True)
        incoming = torch.empty_like(partial)
        for step in binomial_reduce(comm.rank, comm.world_size, root):
            transfer(comm, step, partial, incoming)
            if step.src is not None:
                reduction.combine(partial, incoming, out=partial)
        if comm.rank == root:
            flat.copy_(reduction.finish(partial, comm.world_size))
    return tensor


def all_to_all(
    comm: Comm, tensors: list[torch.Tensor], out: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Send ``tensors[r]`` to rank r, for all r, and receive one tensor from each rank.

    Args:
        tensors: P tensors of one dtype; not changed.
        out: P tensors to receive into, from rank 0 to P - 1; returned. Needed where shapes differ,
            since a rank cannot know the shapes that the others send; by default new tensors. They
            must share memory neither with each other nor with ``tensors``.

    In step s every rank sends to rank + s and receives from rank - s (mod P), so that no rank gets
    several messages at once. Steps and messages P - 1, bytes (P - 1) S if shapes are equal.
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
            comm.exchange(tensors[step.dst], step.dst, out[step.src], step.src)
        out[comm.rank].detach().copy_(tensors[comm.rank].detach())
    return out
