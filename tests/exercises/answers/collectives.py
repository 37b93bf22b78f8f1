"""Answers to ``check.collectives``."""

from functools import partial

import torch
from graded import Answers

from labkit import collectives
from workbook import check


def receives_from_each(comm, tensor, root, buffer_of=torch.empty_like, own=True):
    """The root receives from the last rank first."""
    if comm.rank != root:
        comm.send(tensor, root)
        return None
    found = {root: tensor} if own else {}
    for src in reversed(range(comm.world_size)):
        if src != root:
            found[src] = comm.recv(buffer_of(tensor), src)
    return [found[rank] for rank in sorted(found)]


def into_its_own(comm, tensor, root):
    return receives_from_each(comm, tensor, root, lambda own: own)


def into_one_tensor(comm, tensor, root):
    box = torch.empty_like(tensor)
    return receives_from_each(comm, tensor, root, lambda own: box)


def gathers_around_the_ring(comm, tensor, root):
    found = collectives.all_gather(comm, tensor)
    return found if comm.rank == root else None


ANSWERS = [
    Answers(
        check.collectives.gather,
        [receives_from_each],
        [
            into_its_own,
            into_one_tensor,
            gathers_around_the_ring,
            partial(receives_from_each, own=False),
        ],
    ),
]
