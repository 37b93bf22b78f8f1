"""Answers to ``check.ring``."""

from functools import partial

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit import collectives
from workbook import check

travel_by_value(__name__)


def neighbours(comm):
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


# share_reduce(comm, chunks)


def adds(chunks, i, incoming):
    chunks[i] += incoming


def reduces_in(comm, chunks, steps, first=0, put=adds):
    """Share-reduce in ``steps`` steps, from chunk ``rank + first`` on."""
    right, left = neighbours(comm)
    for step in range(steps):
        chunk = (comm.rank + first - step) % comm.world_size
        target = (chunk - 1) % comm.world_size
        incoming = torch.empty_like(chunks[target])
        comm.exchange(chunks[chunk], right, incoming, left)
        put(chunks, target, incoming)


def variant(more=-1, **options):
    """Share-reduce in P + ``more`` steps."""

    def fn(comm, chunks):
        reduces_in(comm, chunks, comm.world_size + more, **options)

    return fn


def overwrites(chunks, i, incoming):
    chunks[i].copy_(incoming)


def divides_its_chunk(comm, chunks):
    collectives.share_reduce(comm, chunks)
    chunks[(comm.rank + 1) % comm.world_size] /= comm.world_size


# share_only(comm, chunks)


def copies_the_whole_tensor(comm, chunks):
    right, left = neighbours(comm)
    whole = torch.cat(chunks)
    sizes = [len(chunk) for chunk in chunks]
    for step in range(comm.world_size - 1):
        incoming = torch.empty_like(whole)
        comm.exchange(whole, right, incoming, left)
        target = (comm.rank - step) % comm.world_size
        chunks[target].copy_(incoming.split(sizes)[target])
        whole = incoming


def stores_one_place_too_far(comm, chunks):
    collectives.share_only(comm, chunks)
    whole = torch.cat([chunks[-1], *chunks[:-1]])
    for chunk, moved in zip(chunks, whole.split([len(chunk) for chunk in chunks])):
        chunk.copy_(moved)


# all_reduce(comm, tensor)


def takes_the_mean(comm, tensor):
    collectives.ring_all_reduce(comm, tensor, "mean")


def works_in_float16(comm, tensor):
    half = tensor.half()
    collectives.ring_all_reduce(comm, half)
    tensor.copy_(half)


# weighted_mean(comm, gradient, num_samples)


def in_two_rows(comm, gradient, num_samples):
    rows = torch.stack([gradient * num_samples, torch.full_like(gradient, num_samples)])
    total, counts = collectives.ring_all_reduce(comm, rows)
    return total / counts


def then_weighted(change):
    def fn(comm, gradient, num_samples):
        own = gradient.clone()
        collectives.ring_all_reduce(comm, packed := torch.cat([own, own[:1]]))
        total = packed[:-1]
        return change(comm, own, total, num_samples)

    return fn


# rotate_and_add(comm, tensor)


def rotates(comm, tensor, steps=-1):
    right, left = neighbours(comm)
    passing = tensor.clone()
    for _ in range(comm.world_size + steps):
        incoming = torch.empty_like(tensor)
        comm.exchange(passing, right, incoming, left)
        tensor += incoming
        passing = incoming


def rotates_in_numpy(comm, tensor):
    right, left = neighbours(comm)
    total, passing = tensor.numpy(), tensor.numpy().copy()
    for _ in range(comm.world_size - 1):
        incoming = np.zeros_like(passing)
        comm.exchange(torch.from_numpy(passing), right, torch.from_numpy(incoming), left)
        total += incoming
        passing = incoming


def passes_on_the_sum(comm, tensor):
    right, left = neighbours(comm)
    for _ in range(comm.world_size - 1):
        incoming = torch.empty_like(tensor)
        comm.exchange(tensor, right, incoming, left)
        tensor += incoming


def adds_to_a_new_tensor(comm, tensor):
    total = tensor.clone()
    rotates(comm, total)
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
        [collectives.share_reduce],
        [variant(put=overwrites), divides_its_chunk],
        on=4,
    ),
    Answers(
        check.ring.share_only,
        [collectives.share_only],
        [variant(first=1), copies_the_whole_tensor, stores_one_place_too_far],
        on=4,
    ),
    Answers(
        check.ring.all_reduce,
        [collectives.ring_all_reduce],
        [works_in_float16, takes_the_mean, lambda comm, tensor: tensor.zero_()],
        on=4,
    ),
    Answers(
        check.ring.weighted_mean,
        [in_two_rows],
        [
            then_weighted(lambda comm, own, total, n: total / comm.world_size),
            then_weighted(lambda comm, own, total, n: own),
        ],
    ),
    Answers(
        check.ring.rotate_and_add,
        [rotates_in_numpy],
        [passes_on_the_sum, adds_to_a_new_tensor, partial(rotates, steps=-2)],
    ),
]
