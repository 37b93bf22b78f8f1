"""Answers to ``check.collectives``."""

from itertools import repeat

import torch
from graded import Answers
from ranks import travel_by_value

from labkit import collectives
from workbook import check

travel_by_value(__name__)


# gather(comm, tensor, root)


def receives_from_each(order_of, buffers_for=lambda tensor: map(torch.empty_like, repeat(tensor))):
    """The root receives in the order ``order_of(comm, root)``, into one buffer after another."""

    def fn(comm, tensor, root):
        if comm.rank != root:
            comm.send(tensor, root)
            return None
        buffers = buffers_for(tensor)
        ranks = order_of(comm, root)
        return [tensor if src == root else comm.recv(next(buffers), src) for src in ranks]

    return fn


def one_buffer(tensor):
    return repeat(torch.empty_like(tensor))


def every_rank(comm, root):
    return range(comm.world_size)


def gathers_around_the_ring(comm, tensor, root):
    found = collectives.all_gather(comm, tensor)
    return found if comm.rank == root else None


def keeps_quiet(comm, tensor, root):
    return [tensor] * comm.world_size if comm.rank == root else None


ANSWERS = [
    Answers(
        check.collectives.gather,
        [collectives.gather],
        [receives_from_each(every_rank, one_buffer), gathers_around_the_ring, keeps_quiet],
    ),
]
