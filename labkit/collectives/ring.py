"""Ring all-reduce: every rank sends and receives in every step, and no rank is a bottleneck.

    rank 0 -> rank 1 -> rank 2 -> rank 3
      ^                              |
      +------------------------------+

1. Cut the tensor into P chunks. 2. Reduce-scatter (``share_reduce``): in P - 1 steps each chunk
travels once around the ring, and every rank adds its own values to it; at the end each rank owns
one complete chunk. 3. All-gather (``share_only``): in P - 1 more steps the complete chunks travel
around, and all ranks copy them. Used alone, the two halves are ``reduce_scatter`` and
``all_gather``, where the tensor of rank r takes the place of the chunk that rank r owns.

Each rank sends 2 (P - 1) / P x S bytes in 2 (P - 1) messages: always less than 2 S, however many
ranks there are (16-bit floats: less than 3 S, see ``share_reduce``). ``labkit.schedules.ring``
says which chunk goes where in each step.

Symbols: P ranks, S bytes. Source: Patarasuk and Yuan (2009), section 3.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from labkit.collectives.common import Reduction, check_one_per_rank, in_place, new_like
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.transport import check_apart
from labkit.schedules.ring import chunk_bounds, owned_chunk, ring_share_only, ring_share_reduce


def ring_all_reduce(comm: Comm, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Reduce ``tensor`` over all ranks, in place.

    Args:
        tensor: any shape, any size (also 0, or fewer elements than ranks); the same shape and
            dtype on every rank. Returned.
        op: an operation of ``Reduction``: "sum", "mean", "max", ....

    Each chunk is summed in one order, along the ring, so all ranks get the same bits.
    """
    with in_place(tensor) as flat, comm.collective("ring_all_reduce", tensor, op):
        chunks = split_chunks(flat, comm.world_size)
        share_reduce(comm, chunks, op)
        share_only(comm, chunks)
    return tensor


def share_reduce(comm: Comm, chunks: list[torch.Tensor], op: str = "sum") -> None:
    """Reduce-scatter the chunks in P - 1 steps along the ring (here also called share-reduce).

    In step s rank r sends chunk r - s to its right neighbor, receives the partial sum of chunk
    r - s - 1 from its left neighbor, and adds its own values to it (numbers mod P).

    Args:
        chunks: P tensors, one per rank. On return chunk (rank + 1) mod P holds the complete
            result; the contents of the others are not defined.
        op: an operation of ``Reduction``; for "mean" the owner divides the chunk.

    Messages P - 1, bytes (P - 1) / P x S; twice that for 16-bit floats, whose partial sums travel
    as float32.
    """
    with phase(comm, "share_reduce", chunks, op):
        reduction = Reduction.of(op, chunks[0])
        partial = [chunk.to(reduction.accumulate_dtype) for chunk in chunks]
        for step in ring_share_reduce(comm.rank, comm.world_size):
            chunk = partial[step.recv_chunk]
            incoming = torch.empty_like(chunk)
            comm.exchange(partial[step.send_chunk], step.dst, incoming, step.src)
            reduction.combine(chunk, incoming, out=chunk)
        owned = owned_chunk(comm.rank, comm.world_size)
        chunks[owned].copy_(reduction.finish(partial[owned], comm.world_size))


def share_only(comm: Comm, chunks: list[torch.Tensor]) -> None:
    """All-gather the complete chunks in P - 1 steps along the ring (also called share-only).

    Args:
        chunks: P tensors, of which chunk (rank + 1) mod P is complete. On return all are.

    Messages P - 1, bytes (P - 1) / P x S.
    """
    with phase(comm, "share_only", chunks):
        for step in ring_share_only(comm.rank, comm.world_size):
            comm.exchange(chunks[step.send_chunk], step.dst, chunks[step.recv_chunk], step.src)


def all_gather(comm: Comm, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Gather every rank's ``tensor`` on all ranks.

    Args:
        tensor: any shape and dtype, the same on every rank; not changed.

    Returns:
        P new tensors, in the order of the ranks.

    Steps and messages P - 1, bytes (P - 1) S on every rank.
    """
    ranks = range(comm.world_size)
    with comm.collective("all_gather", tensor):
        chunks = [new_like(tensor) for _ in ranks]
        chunks[owned_chunk(comm.rank, comm.world_size)].copy_(tensor.detach())
        share_only(comm, chunks)
    return [chunks[owned_chunk(rank, comm.world_size)] for rank in ranks]


def reduce_scatter(comm: Comm, tensors: list[torch.Tensor], op: str = "sum") -> torch.Tensor:
    """Reduce P tensors over all ranks; rank r gets the result of ``tensors[r]``.

    Args:
        tensors: P tensors of one dtype, the same shapes on every rank; not changed.
        op: an operation of ``Reduction``: "sum", "mean", "max", ....

    Returns:
        A new tensor of the shape of ``tensors[rank]``.

    Steps and messages P - 1, bytes (P - 1) S on every rank if the shapes are equal (twice that
    for 16-bit floats, whose partial sums travel as float32).
    """
    check_one_per_rank(comm, tensors, "tensors to reduce")
    Reduction.of(op, tensors[0])
    with comm.collective("reduce_scatter", tensors[0], op):
        # Rank c - 1 owns chunk c, and the last rank chunk 0.
        by_chunk = [tensors[-1], *tensors[:-1]]
        chunks = [new_like(tensor).copy_(tensor.detach()) for tensor in by_chunk]
        share_reduce(comm, chunks, op)
    return chunks[owned_chunk(comm.rank, comm.world_size)]


def split_chunks(flat: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Cut a flat tensor [N] into P views, whose sizes differ by at most one element."""
    return [flat[start:end] for start, end in chunk_bounds(flat.numel(), world_size)]


@contextmanager
def phase(comm: Comm, name: str, chunks: list[torch.Tensor], op: str = "") -> Iterator[None]:
    """Wrap half of a ring: check it, announce it, name it in the trace, disable autograd."""
    check_one_per_rank(comm, chunks, "chunks")
    check_apart({f"chunks[{number}]": chunk for number, chunk in enumerate(chunks)})
    with torch.no_grad(), comm.collective(name, chunks[0], op), comm.span(name):
        yield
