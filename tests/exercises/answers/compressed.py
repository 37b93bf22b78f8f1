"""Answers to ``check.compressed``."""

from functools import partial

import torch
from graded import Answers

from labkit.collectives import all_gather, ring_all_reduce
from labkit.collectives.ring import split_chunks
from workbook import check

# half_the_bytes(comm, tensor)


def halves(comm, tensor, rounds=True, last=lambda tensor: tensor):
    """The bits of the halves, in messages of int16."""
    P, rank = comm.world_size, comm.rank
    chunks = list(split_chunks(tensor, P))
    for step in range(2 * (P - 1)):
        target = (rank - step - 1) % P
        incoming = torch.empty(len(chunks[target]), dtype=torch.int16)
        outgoing = chunks[(rank - step) % P].half().view(torch.int16)
        comm.exchange(outgoing, (rank + 1) % P, incoming, (rank - 1) % P)
        received = incoming.view(torch.half).float()
        chunks[target] = chunks[target] + received if step < P - 1 else received
    own = (rank + 1) % P
    chunks[own] = chunks[own].half().float() if rounds else chunks[own]
    tensor.copy_(last(torch.cat(chunks)))


# top_k(comm, gradient, residual, k)


def sparse(comm, gradient, residual, k, left_of=torch.add):
    left, total = left_of(gradient, residual), torch.zeros_like(gradient)
    places = left.abs().topk(k).indices
    for v, p in zip(all_gather(comm, left[places]), all_gather(comm, places)):
        total.index_add_(0, p, v)
    return [total, left.index_fill(0, places, 0.0)]


def sends_one_fewer(comm, gradient, residual, k):
    return sparse(comm, gradient, residual, k - 1)


def sends_all_of_the_kth_size(comm, gradient, residual, k):
    left = (gradient + residual).abs()
    return sparse(comm, gradient, residual, int((left >= left.topk(k).values[-1]).sum()))


def adds_into_the_gradient(comm, gradient, residual, k):
    gradient += residual
    return sparse(comm, gradient, torch.zeros_like(residual), k)


ANSWERS = [
    Answers(
        check.compressed.half_the_bytes,
        [halves],
        [
            ring_all_reduce,
            partial(halves, rounds=False),
            partial(halves, last=lambda tensor: (tensor * 4).round() / 4),
        ],
    ),
    Answers(
        check.compressed.top_k,
        [sparse],
        [
            sends_one_fewer,
            sends_all_of_the_kth_size,
            partial(sparse, left_of=lambda gradient, residual: gradient),
            adds_into_the_gradient,
        ],
    ),
]
