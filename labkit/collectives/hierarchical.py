"""Hierarchical all-reduce: inside each host through shared memory, between hosts over its card.

    host 0   rank 0 <-> rank 1         1. inside: share_reduce, each rank gets a part of the sum
               ^          ^            2. between: ring all-reduce of each part, by the ranks that
               v          v               have it, one on each host; all these rings at once
    host 1   rank 2 <-> rank 3         3. inside: share_only of the complete parts

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
from labkit.comm.comm import Comm, SubComm, exchange_under_way
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
        partial, inside = flat.to(reduction.wide), SubComm(comm, comm.hosts[comm.host])
        share_reduce(inside, parts_of(comm, partial), reduction.partial)
        for ring, blocks in rings_of(comm):
            sums, results = (
                split_chunks(cut(comm, whole, blocks), ring.world_size)
                for whole in (partial, flat)
            )
            share_reduce(ring, sums, reduction.partial)
            owned = owned_chunk(ring.rank, ring.world_size)
            results[owned].copy_(reduction.finish(sums[owned], comm.world_size))
            share_only(ring, results)
        share_only(inside, parts_of(comm, flat))
    return tensor


def fast_hierarchical_all_reduce(comm: Comm, tensor: Tensor, op: str = "sum") -> Tensor:
    """``hierarchical_all_reduce`` in slices, whose three parts overlap; arguments as there.

    With one host, or one rank per host, it is ``fast_ring_all_reduce``; where hosts differ in
    size, ranks are in different numbers of rings, and it is ``hierarchical_all_reduce`` itself.
    The bytes are the same; the messages are those of each slice.
    """
    if len(comm.hosts) in (1, comm.world_size):
        return fast_ring_all_reduce(comm, tensor, op)
    if len(set(map(len, comm.hosts))) > 1:
        return hierarchical_all_reduce(comm, tensor, op)
    reduction = Reduction.of(op, tensor)
    with in_place(tensor) as flat, comm.collective("fast_hierarchical_all_reduce", tensor, op):
        most = max(1, BLOCK_BYTES // reduction.wide.itemsize) * num_blocks(comm.hosts)
        _overlapped(comm, reduction, flat.split(most))
    return tensor


def _overlapped(comm: Comm, reduction: Reduction, slices: tuple[Tensor, ...]) -> None:
    inside = SubComm(comm, comm.hosts[comm.host])
    partials = [piece.to(reduction.wide) for piece in slices]
    ((members, blocks),) = rings_between(comm.rank, comm.hosts)
    steps = list(ring_all_reduce(members.index(comm.rank), len(members)))
    share_reduce(inside, parts_of(comm, partials[0]), reduction.partial)
    for number, both in enumerate(zip(partials, slices)):
        sums, results = (split_chunks(cut(comm, whole, blocks), len(members)) for whole in both)
        for place, step in enumerate(steps):
            is_sum = step.phase == "share_reduce"
            chunks = sums if is_sum else results
            mine = chunks[step.recv_chunk]
            incoming = torch.empty_like(mine) if is_sum else mine
            ends = chunks[step.send_chunk], members[step.dst], incoming, members[step.src]
            with comm.span("between_hosts"), exchange_under_way(comm, *ends):
                if place == 0 and number + 1 < len(slices):
                    share_reduce(inside, parts_of(comm, partials[number + 1]), reduction.partial)
                if place == len(steps) - 1 and number:
                    share_only(inside, parts_of(comm, slices[number - 1]))
            if is_sum:
                reduction.combine(mine, incoming, out=mine)
            if place == len(members) - 2:
                results[step.recv_chunk].copy_(reduction.finish(mine, comm.world_size))
    share_only(inside, parts_of(comm, slices[-1]))


def parts_of(comm: Comm, flat: Tensor) -> list[Tensor]:
    """Views of ``flat`` [N], one part for each rank of this rank's host."""
    blocks = parts_inside(len(comm.hosts[comm.host]), comm.hosts)
    return [cut(comm, flat, each) for each in blocks]


def rings_of(comm: Comm) -> Iterator[tuple[Comm, Blocks]]:
    """The rings between hosts that this rank is in, with the blocks that each one sums."""
    for members, blocks in rings_between(comm.rank, comm.hosts):
        yield SubComm(comm, members, phase="between_hosts"), blocks


def cut(comm: Comm, flat: Tensor, blocks: Blocks) -> Tensor:
    """The view of ``flat`` [N] that consists of these blocks."""
    bounds, (first, end) = chunk_bounds(flat.numel(), num_blocks(comm.hosts)), blocks
    return flat[bounds[first][0] : bounds[end - 1][1]]
