"""Ring all-reduce: every rank sends and receives all the time, and no rank is a bottleneck.

    rank 0 -> rank 1 -> rank 2 -> rank 3
      ^                              |
      +------------------------------+

1. Cut the tensor into P chunks. 2. ``share_reduce``: in P - 1 steps each chunk travels once around
the ring and collects every rank's values; at the end each rank owns one complete chunk. 3.
``share_only``: in P - 1 more steps the complete chunks travel around, and each rank copies them.

Each rank sends 2 (P - 1) / P x S bytes in 2 (P - 1) messages: hardly more for many ranks than
for two.

Symbols: P ranks, S bytes. Source: Patarasuk and Yuan (2009), section 3.
"""

import torch

from labkit.comm import Comm
from labkit.schedules import chunk_bounds, ring_share_only, ring_share_reduce


def ring_all_reduce(comm: Comm, tensor: torch.Tensor) -> torch.Tensor:
    """Sum ``tensor`` over all ranks, in place.

    Args:
        comm: this rank's Comm.
        tensor: any shape, any size (also 0, or fewer elements than ranks); the same shape and
            dtype on every rank. Returned.

    Every rank adds in the same order, chunk by chunk, so the result is the same to the bit on all.
    """
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        chunks = split_chunks(flat, comm.world_size)
        share_reduce(comm, chunks)
        share_only(comm, chunks)
        if flat.data_ptr() != tensor.data_ptr():
            # A non-contiguous tensor was copied to be flat.
            tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def share_reduce(comm: Comm, chunks: list[torch.Tensor]) -> None:
    """P - 1 steps, each adding the left neighbour's chunk (the literature's reduce-scatter).

    Args:
        comm: this rank's Comm.
        chunks: P tensors, one per rank. On return chunk (rank + 1) mod P holds the complete sum;
            the others hold partial ones.

    Messages P - 1, bytes (P - 1) / P x S.
    """
    with comm.span("share_reduce"):
        for step in ring_share_reduce(comm.rank, comm.world_size):
            target = chunks[step.recv_chunk]
            incoming = torch.empty_like(target)
            comm.exchange(chunks[step.send_chunk], step.dst, incoming, step.src)
            target += incoming


def share_only(comm: Comm, chunks: list[torch.Tensor]) -> None:
    """P - 1 steps, each copying the left neighbour's complete chunk (the literature's all-gather).

    Args:
        comm: this rank's Comm.
        chunks: P tensors; chunk (rank + 1) mod P is complete. On return all of them are.

    Messages P - 1, bytes (P - 1) / P x S.
    """
    with comm.span("share_only"):
        for step in ring_share_only(comm.rank, comm.world_size):
            comm.exchange(chunks[step.send_chunk], step.dst, chunks[step.recv_chunk], step.src)


def split_chunks(flat: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """P views of a flat tensor [N], sizes differing by at most one element."""
    return [flat[start:end] for start, end in chunk_bounds(flat.numel(), world_size)]
