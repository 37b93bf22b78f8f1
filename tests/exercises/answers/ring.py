"""Answers to ``check.ring``."""

from functools import partial

import numpy as np
import torch
from graded import Answers

from labkit import collectives
from workbook import check


def neighbors(comm):
    return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size


# naive_all_reduce(comm, tensor)


def through_rank_0(comm, tensor, own=1.0):
    """Rank 0 begins with ``own`` times its numbers, and receives from the last rank first."""
    if comm.rank:
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    tensor *= own
    for source in reversed(range(1, comm.world_size)):
        comm.recv_add(tensor, source)
    for destination in range(1, comm.world_size):
        comm.send(tensor, destination)


def all_to_all(comm, tensor):
    tensor.copy_(sum(collectives.all_gather(comm, tensor.clone())))


# share_reduce(comm, chunks), share_only(comm, chunks)


def passes_chunks(comm, chunks, put, first=0, more=-1):
    """Send chunks around in P + ``more`` steps, from chunk ``rank + first`` on."""
    right, left = neighbors(comm)
    for step in range(comm.world_size + more):
        chunk = (comm.rank + first - step) % comm.world_size
        target = (chunk - 1) % comm.world_size
        incoming = torch.empty_like(chunks[target])
        comm.exchange(chunks[chunk], right, incoming, left)
        put(chunks[target], incoming)


reduces = partial(passes_chunks, put=torch.Tensor.add_)
copies = partial(passes_chunks, put=torch.Tensor.copy_, first=1)


def one_after_another(comm, chunks):
    """Right values, in a queue: all but rank 0 receive before they send."""
    right, left = neighbors(comm)
    for step in range(comm.world_size - 1):
        chunk, target = ((comm.rank - step - k) % comm.world_size for k in (0, 1))
        incoming = torch.empty_like(chunks[target])
        if comm.rank:
            comm.recv(incoming, left)
        comm.send(chunks[chunk], right)
        if comm.rank == 0:
            comm.recv(incoming, left)
        chunks[target] += incoming


def copies_the_whole_tensor(comm, chunks):
    right, left = neighbors(comm)
    whole = torch.cat(chunks)
    sizes = [len(chunk) for chunk in chunks]
    for step in range(comm.world_size - 1):
        incoming = torch.empty_like(whole)
        comm.exchange(whole, right, incoming, left)
        target = (comm.rank - step) % comm.world_size
        chunks[target].copy_(incoming.split(sizes)[target])
        whole = incoming


# all_reduce(comm, tensor)


def by_halves(comm, tensor):
    chunks = collectives.ring.split_chunks(tensor.view(-1), comm.world_size)
    reduces(comm, chunks)
    copies(comm, chunks)


def works_in_float16(comm, tensor):
    half = tensor.half()
    collectives.ring_all_reduce(comm, half)
    tensor.copy_(half)


# weighted_mean(comm, gradient, num_samples)


def in_two_rows(comm, gradient, num_samples, weights=lambda n: n):
    ones = torch.full_like(gradient, weights(num_samples))
    rows = torch.stack([gradient * weights(num_samples), ones])
    total, counts = collectives.ring_all_reduce(comm, rows)
    return total / counts


# rotate_and_add(comm, tensor)


def rotates_in_numpy(comm, tensor, more=-1, passes_the_sum=False):
    right, left = neighbors(comm)
    total, passing = tensor.numpy(), tensor.numpy().copy()
    for _ in range(comm.world_size + more):
        incoming = np.zeros_like(passing)
        comm.exchange(torch.from_numpy(passing), right, torch.from_numpy(incoming), left)
        total += incoming
        passing = total.copy() if passes_the_sum else incoming


def adds_to_a_new_tensor(comm, tensor):
    total = tensor.clone()
    rotates_in_numpy(comm, total)
    return total


ANSWERS = [
    Answers(
        check.ring.naive_all_reduce,
        [through_rank_0],
        [partial(through_rank_0, own=0.0), all_to_all, collectives.ring_all_reduce],
        on=4,
    ),
    Answers(
        check.ring.share_reduce,
        [reduces],
        [one_after_another, partial(reduces, more=0)],
        on=4,
    ),
    Answers(
        check.ring.share_only,
        [copies],
        [partial(copies, first=0), copies_the_whole_tensor, partial(copies, more=-2)],
        on=4,
    ),
    Answers(
        check.ring.all_reduce,
        [by_halves],
        [works_in_float16],
        on=4,
    ),
    Answers(
        check.ring.weighted_mean,
        [in_two_rows],
        [
            partial(in_two_rows, weights=lambda n: 1),
            partial(in_two_rows, weights=lambda n: n + 1),
            lambda comm, gradient, num_samples: gradient,
        ],
    ),
    Answers(
        check.ring.rotate_and_add,
        [rotates_in_numpy],
        [
            partial(rotates_in_numpy, passes_the_sum=True),
            adds_to_a_new_tensor,
            partial(rotates_in_numpy, more=-2),
        ],
    ),
]
