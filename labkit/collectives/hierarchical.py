"""Hierarchical all-reduce: inside each host through shared memory, between hosts over its card.

    host 0   rank 0 <-> rank 1         1. inside: reduce-scatter, each rank gets a part of the sum
               ^          ^            2. between: ring all-reduce of each part, by the ranks that
               v          v               have it, one on each host; all these rings at once
    host 1   rank 2 <-> rank 3         3. inside: all-gather of the complete parts

A host's sum leaves the host once, however many ranks it has: 2 (H - 1) / H x S bytes over each
card, in 2 (H - 1) steps. The flat ring sends 2 (P - 1) / P x S bytes over each card in 2 (P - 1)
steps if ranks are numbered host by host, and up to m times as many if they are not. A leader that
did step 2 alone for its host would send as many bytes as all ranks at once, but would add them up
alone too, and the steps inside would be a reduce and a broadcast of the whole tensor.

Hosts may differ in size; ``labkit.schedules.ring`` says who has which part. With one host,
or one rank per host, it is the ring.

The fast one cuts the tensor into slices, and overlaps the three parts: while slice g is on the
network, slice g + 1 is added up inside the host, and slice g - 1 is shared there. So a large
tensor takes about as long as its bytes over the card.

    inside       add 0 | add 1         | add 2, share 0 | ...  | share last
    between            | 0 ->    <- 0  | 1 ->      <- 1 | ...  |

Symbols: P ranks on H hosts, m ranks per host, S bytes. Source: Cho et al., "BlueConnect" (2019).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from labkit.collectives.common import Reduction, in_place
from labkit.collectives.fast_ring import fast_ring_all_reduce
from labkit.collectives.ring import share_only, share_reduce, split_chunks
from labkit.engine.comm.comm import Comm, SubComm, exchange_under_way
from labkit.schedules.ring import (
    Blocks,
    chunk_bounds,
    num_blocks,
    owned_chunk,
    parts_inside,
    ring_all_reduce,
    rings_between,
)

# Of one block of a slice: its latency is small beside its time on a card of 10 Gb/s.
BLOCK_BYTES = 2 * 2**20


def hierarchical_all_reduce(comm: Comm, tensor: Tensor, op: str = "sum") -> Tensor:
    """Reduce ``tensor`` over all ranks, in place.

    Args:
        tensor: any shape, any size (also 0, or fewer elements than ranks); the same shape and
            dtype on every rank. Returned.
        op: an operation of ``Reduction``: "sum", "mean", "max", ....

    Every rank gets the same bits. They are those of the flat ring with one host, or one rank per
    host; otherwise a sum may be rounded differently, since it is added up in another order.
    """
    reduction = Reduction.of(op, tensor)
    with in_place(tensor) as flat, comm.collective("hierarchical_all_reduce", tensor, op):
        partial = flat.to(reduction.accumulate_dtype)
        inside = SubComm(comm, comm.hosts[comm.host])
        share_reduce(inside, parts_of(comm, partial), reduction.partial)
        for ring, blocks in rings_of(comm):
            sums = split_chunks(cut(comm, partial, blocks), ring.world_size)
            results = split_chunks(cut(comm, flat, blocks), ring.world_size)
            share_reduce(ring, sums, reduction.partial)
            owned = owned_chunk(ring.rank, ring.world_size)
            results[owned].copy_(reduction.finish(sums[owned], comm.world_size))
            share_only(ring, results)
        share_only(inside, parts_of(comm, flat))
    return tensor


def fast_hierarchical_all_reduce(comm: Comm, tensor: Tensor, op: str = "sum") -> Tensor:
    """Reduce as ``hierarchical_all_reduce`` does, in slices whose three parts overlap.

    Arguments and bytes as there; the messages are those of each slice. With one host, or one rank
    per host, it is ``fast_ring_all_reduce``; where hosts differ in size, ranks are in different
    numbers of rings, and it is ``hierarchical_all_reduce`` itself.
    """
    if len(comm.hosts) in (1, comm.world_size):
        return fast_ring_all_reduce(comm, tensor, op)
    if len(set(map(len, comm.hosts))) > 1:
        return hierarchical_all_reduce(comm, tensor, op)
    reduction = Reduction.of(op, tensor)
    with in_place(tensor) as flat, comm.collective("fast_hierarchical_all_reduce", tensor, op):
        most = max(1, BLOCK_BYTES // reduction.accumulate_dtype.itemsize) * num_blocks(comm.hosts)
        _reduce_slices(comm, reduction, flat.split(most))
    return tensor


def _reduce_slices(comm: Comm, reduction: Reduction, slices: tuple[Tensor, ...]) -> None:
    """Reduce the slices [n] over all ranks, overlapped as in the module's drawing."""
    inside = SubComm(comm, comm.hosts[comm.host])
    partials = [piece.to(reduction.accumulate_dtype) for piece in slices]
    ((members, blocks),) = rings_between(comm.rank, comm.hosts)
    steps = list(ring_all_reduce(members.index(comm.rank), len(members)))
    share_reduce(inside, parts_of(comm, partials[0]), reduction.partial)
    for number in range(len(slices)):
        sums = split_chunks(cut(comm, partials[number], blocks), len(members))
        results = split_chunks(cut(comm, slices[number], blocks), len(members))
        for step_number, step in enumerate(steps):
            is_sum = step.phase == "share_reduce"
            chunks = sums if is_sum else results
            outgoing = chunks[step.send_chunk]
            chunk = chunks[step.recv_chunk]
            incoming = torch.empty_like(chunk) if is_sum else chunk
            dst, src = members[step.dst], members[step.src]
            exchange = exchange_under_way(comm, send=outgoing, dst=dst, recv=incoming, src=src)
            with comm.span("between_hosts"), exchange:
                if step_number == 0 and number + 1 < len(slices):
                    share_reduce(inside, parts_of(comm, partials[number + 1]), reduction.partial)
                if step_number == len(steps) - 1 and number > 0:
                    share_only(inside, parts_of(comm, slices[number - 1]))
            if is_sum:
                reduction.combine(chunk, incoming, out=chunk)
            # The last sum of this rank's ring: its chunk is complete.
            if step_number == len(members) - 2:
                results[step.recv_chunk].copy_(reduction.finish(chunk, comm.world_size))
    share_only(inside, parts_of(comm, slices[-1]))


def parts_of(comm: Comm, flat: Tensor) -> list[Tensor]:
    """Cut ``flat`` [N] into views, one part for each rank of this rank's host."""
    blocks_by_rank = parts_inside(len(comm.hosts[comm.host]), comm.hosts)
    return [cut(comm, flat, blocks) for blocks in blocks_by_rank]


def rings_of(comm: Comm) -> Iterator[tuple[Comm, Blocks]]:
    """Yield the rings between hosts that this rank is in, and the blocks that each one sums."""
    for members, blocks in rings_between(comm.rank, comm.hosts):
        yield SubComm(comm, members, phase="between_hosts"), blocks


def cut(comm: Comm, flat: Tensor, blocks: Blocks) -> Tensor:
    """Return the view of ``flat`` [N] that consists of these blocks."""
    bounds = chunk_bounds(flat.numel(), num_blocks(comm.hosts))
    first, end = blocks
    return flat[bounds[first][0] : bounds[end - 1][1]]
