"""Answers to ``check.compressed``."""

import torch
from graded import Answers
from ranks import travel_by_value

from labkit.collectives import all_gather, ring_all_reduce, share_only
from labkit.collectives.ring import split_chunks
from workbook import check

travel_by_value(__name__)


# half_the_bytes(comm, tensor)


def halves_messages(comm, tensor, half=torch.float16, rounds=True):
    P, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % P, (rank - 1) % P
    chunks = tensor.tensor_split(P)
    for step in range(P - 1):
        target = chunks[(rank - step - 1) % P]
        incoming = torch.empty_like(target, dtype=half)
        comm.exchange(chunks[(rank - step) % P].to(half), right, incoming, left)
        target += incoming
    if rounds:
        chunks[(rank + 1) % P].copy_(chunks[(rank + 1) % P].to(half))
    for step in range(P - 1):
        target = chunks[(rank - step) % P]
        incoming = torch.empty_like(target, dtype=half)
        comm.exchange(chunks[(rank + 1 - step) % P].to(half), right, incoming, left)
        target.copy_(incoming)


def around(comm, chunks):
    """A ring that adds in the precision of the chunks."""
    P, rank = comm.world_size, comm.rank
    for step in range(P - 1):
        target = chunks[(rank - step - 1) % P]
        incoming = torch.empty_like(target)
        comm.exchange(chunks[(rank - step) % P], (rank + 1) % P, incoming, (rank - 1) % P)
        target += incoming
    share_only(comm, chunks)


def adds_halves(comm, tensor):
    small = tensor.half()
    around(comm, list(small.tensor_split(comm.world_size)))
    tensor.copy_(small)


def as_integers(comm, tensor):
    """The bits of the halves, in messages of int16."""
    P, rank = comm.world_size, comm.rank
    chunks = [chunk.half() for chunk in split_chunks(tensor, P)]
    for step in range(2 * (P - 1)):
        target = (rank - step - 1) % P
        incoming = torch.empty(len(chunks[target]), dtype=torch.int16)
        outgoing = chunks[(rank - step) % P].view(torch.int16)
        comm.exchange(outgoing, (rank + 1) % P, incoming, (rank - 1) % P)
        received = incoming.view(torch.half)
        chunks[target] = chunks[target] + received if step < P - 1 else received
    tensor.copy_(torch.cat(chunks))


def keeps_its_own_unrounded(comm, tensor):
    halves_messages(comm, tensor, rounds=False)


def in_eight_bits(comm, tensor):
    adds_halves(comm, tensor)
    tensor.copy_((tensor * 4).round() / 4)


# top_k(comm, gradient, residual, k)


def adds_up(comm, size, values, places):
    total = torch.zeros(size)
    for v, p in zip(all_gather(comm, values), all_gather(comm, places)):
        total.index_add_(0, p, v)
    return total


def sparse(comm, gradient, residual, k, order=torch.abs):
    left = gradient + residual
    places = order(left).topk(k).indices
    total = adds_up(comm, len(left), left[places], places)
    return [total, left.index_fill(0, places, 0.0)]


def sends_one_fewer(comm, gradient, residual, k):
    return sparse(comm, gradient, residual, k - 1)


def adds_into_the_gradient(comm, gradient, residual, k):
    gradient += residual
    return sparse(comm, gradient, torch.zeros_like(residual), k)


ANSWERS = [
    Answers(
        check.compressed.half_the_bytes,
        [as_integers],
        [ring_all_reduce, keeps_its_own_unrounded, in_eight_bits],
    ),
    Answers(
        check.compressed.top_k,
        [sparse],
        [sends_one_fewer, adds_into_the_gradient],
    ),
]
