"""Carrying out what the ranks have agreed on: many small all-reduces as one.

1. Copy the tensors, scaled, into one buffer for each dtype; a rank that has none puts zeros there.
2. Run one ring on the buffer. 3. Cut the results out. A ring costs 2 (P - 1) latencies, whatever
its size: hundreds of small gradients pay them once.

Symbols: P ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.collectives.fast_ring import fast_ring_all_reduce
from labkit.collectives.pairwise import all_to_all
from labkit.collectives.requests import Decision, Request, dtype_of
from labkit.collectives.ring import reduce_scatter, share_only
from labkit.collectives.rooted import broadcast
from labkit.comm.comm import Comm
from labkit.schedules.ring import owned_chunk

# What one rank has for a request; None for zeros.
Values = list[Tensor] | None


def carry_out(
    comm: Comm, decision: Decision, values: Sequence[Values]
) -> list[list[Tensor] | None]:
    """The results of each request, on the CPU; None for one that no rank has a value for.

    Args:
        values: by request, this rank's tensors on the CPU; they are not changed.
    """
    request, mine = decision.requests[0], list(values[0] or [])
    if request.kind == "allreduce":
        return _all_reduce(comm, decision.requests, values)
    if request.kind == "allgather":
        rows = [list(of_tensor) for of_tensor in zip(*decision.rows)]
        return [[_gather_rows(comm, one, counts) for one, counts in zip(mine, rows)]]
    if request.kind == "broadcast":
        assert request.root is not None
        return [[broadcast(comm, one.clone(), request.root) for one in mine]]
    if request.kind == "alltoall":
        counts = [splits[comm.rank] for splits in decision.rows]
        out = [mine[0].new_empty(count, *mine[0].shape[1:]) for count in counts]
        all_to_all(comm, list(mine[0].split(decision.rows[comm.rank])), out)
        return [[torch.cat(out), torch.tensor(counts, dtype=torch.int32)]]
    if request.kind == "reducescatter":
        return [[_scatter_rows(comm, one, request) for one in mine]]
    # A barrier: all ranks have come.
    return [[]]


def _all_reduce(
    comm: Comm, requests: Sequence[Request], values: Sequence[Values]
) -> list[list[Tensor] | None]:
    first, pieces = requests[0], dict[str, list[Tensor]]()
    wanted = [(one, mine) for one, mine in zip(requests, values) if one.has_value]
    for request, mine in wanted:
        for place, (dtype, shape) in enumerate(zip(request.dtypes, request.shapes)):
            value = torch.zeros(shape, dtype=dtype_of(dtype)) if mine is None else mine[place]
            pieces.setdefault(dtype, []).append(scaled(value.reshape(-1), first.prescale))
    results = {dtype: iter(_reduced(comm, of, first)) for dtype, of in pieces.items()}
    found = iter(
        [next(results[d]).view(s) for d, s in zip(request.dtypes, request.shapes)]
        for request, _ in wanted
    )
    return [next(found) if request.has_value else None for request in requests]


def _reduced(comm: Comm, pieces: Sequence[Tensor], request: Request) -> Sequence[Tensor]:
    """The pieces, each reduced over all ranks, by one ring on all of them."""
    buffer = torch.cat(list(pieces))
    op, is_exact = request.op, not (buffer.is_floating_point() or buffer.is_complex())
    fast_ring_all_reduce(comm, buffer, "sum" if op == "mean" and is_exact else op)
    if op == "mean" and is_exact:
        buffer = scaled(buffer, 1 / comm.world_size)
    return scaled(buffer, request.postscale).split([len(piece) for piece in pieces])


def scaled(values: Tensor, factor: float) -> Tensor:
    """Times ``factor``; integers in float64, rounded towards 0."""
    if factor == 1:
        return values
    if values.is_floating_point() or values.is_complex():
        return values * factor
    return (values.double() * factor).to(values.dtype)


def _gather_rows(comm: Comm, mine: Tensor, rows: list[int]) -> Tensor:
    """All ranks' tensors, one below the other; ``rows`` says how many each has."""
    out = mine.new_empty(sum(rows), *mine.shape[1:])
    parts = out.split(rows)
    parts[comm.rank].copy_(mine)
    # Rank c - 1 owns chunk c.
    chunks = {owned_chunk(rank, comm.world_size): part for rank, part in enumerate(parts)}
    share_only(comm, [chunks[number] for number in range(comm.world_size)])
    return out


def _scatter_rows(comm: Comm, mine: Tensor, request: Request) -> Tensor:
    """This rank's rows of the reduced tensor; the first ranks have one more if need be."""
    each, more = divmod(len(mine), comm.world_size)
    rows = [each + (rank < more) for rank in range(comm.world_size)]
    shares = list(scaled(mine, request.prescale).split(rows))
    op, is_exact = request.op, not (mine.is_floating_point() or mine.is_complex())
    total = reduce_scatter(comm, shares, "sum" if op == "mean" and is_exact else op)
    if op == "mean" and is_exact:
        total = scaled(total, 1 / comm.world_size)
    return scaled(total, request.postscale)
