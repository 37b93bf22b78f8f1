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

Symbols: P ranks on H hosts, m ranks per host, S bytes. Source: Cho et al., "BlueConnect" (2019).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from labkit.collectives.common import in_place
from labkit.collectives.reduction import Reduction
from labkit.collectives.ring import share_only, share_reduce, split_chunks
from labkit.comm.comm import Comm, SubComm
from labkit.schedules.ring import (
    Blocks,
    chunk_bounds,
    num_blocks,
    owned_chunk,
    parts_inside,
    rings_between,
)


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
    with (
        torch.no_grad(),
        in_place(tensor) as flat,
        comm.collective("hierarchical_all_reduce", tensor, op),
    ):
        partial = flat.to(reduction.wide)
        inside = SubComm(comm, comm.hosts[comm.host])
        share_reduce(inside, parts_of(comm, partial), reduction.partial)
        for ring, begin, end in rings_of(comm, flat.numel()):
            all_reduce_between(ring, partial[begin:end], flat[begin:end], reduction, comm)
        share_only(inside, parts_of(comm, flat))
    return tensor


def all_reduce_between(
    ring: Comm, partial: Tensor, result: Tensor, reduction: Reduction, comm: Comm
) -> None:
    """Ring all-reduce of one part over the hosts: from their sums to the result of all P ranks."""
    sums, results = (split_chunks(part, ring.world_size) for part in (partial, result))
    share_reduce(ring, sums, reduction.partial)
    owned = owned_chunk(ring.rank, ring.world_size)
    results[owned].copy_(reduction.finish(sums[owned], comm.world_size))
    share_only(ring, results)


def parts_of(comm: Comm, flat: Tensor) -> list[Tensor]:
    """Views of ``flat`` [N], one part for each rank of this rank's host."""
    blocks = parts_inside(len(comm.hosts[comm.host]), comm.hosts)
    return [flat[slice(*ends)] for ends in _elements(comm, flat.numel(), blocks)]


def rings_of(comm: Comm, num_elements: int) -> Iterator[tuple[Comm, int, int]]:
    """The rings between hosts that this rank is in, with the elements that each one sums."""
    rings = list(rings_between(comm.rank, comm.hosts))
    places = _elements(comm, num_elements, [blocks for _, blocks in rings])
    for (members, _), (begin, end) in zip(rings, places):
        yield SubComm(comm, members, phase="between_hosts"), begin, end


def _elements(comm: Comm, num_elements: int, blocks: list[Blocks]) -> list[tuple[int, int]]:
    bounds = chunk_bounds(num_elements, num_blocks(comm.hosts))
    return [(bounds[first][0], bounds[end - 1][1]) for first, end in blocks]
