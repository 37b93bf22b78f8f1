"""More answers to ``check.naive``: right ones in unusual forms, wrong ones that look right."""

from functools import reduce as fold

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from answers.naive import through_rank_0
from labkit import collectives
from workbook import check

travel_by_value(__name__)


def to_rank_0_and_back(add_up, back=range):
    """The others exchange with rank 0, which calls ``add_up(comm, tensor, others)``."""

    def fn(comm, tensor):
        others = range(1, comm.world_size)
        if comm.rank:
            comm.send(tensor, 0)
            comm.recv(tensor, 0)
            return
        add_up(comm, tensor, others)
        for dst in back(1, comm.world_size):
            comm.send(tensor, dst)

    return fn


def whoever_comes_first(comm, tensor, others):
    waiting, incoming = set(others), torch.empty_like(tensor)
    while waiting:
        waiting.remove(comm.recv_any(incoming, waiting))
        tensor.add_(incoming)


def recv_adds(comm, tensor, others):
    for src in reversed(others):
        comm.recv_add(tensor, src)


def stacks_then_sums(comm, tensor, others):
    rows = torch.empty(len(others) + 1, *tensor.shape)
    rows[0] = tensor
    for src in others:
        comm.recv(rows[src], src)
    torch.sum(rows, dim=0, out=tensor)


def folds(comm, tensor, others):
    found = [comm.recv(torch.empty_like(tensor), src) for src in others]
    tensor[...] = fold(torch.add, found, tensor)


def in_float64(comm, tensor, others):
    arrays = [comm.recv(tensor.new_empty(tensor.shape), src).numpy() for src in others]
    tensor.numpy()[...] = np.sum([tensor.numpy(), *arrays], axis=0, dtype=np.float64)


def others_exchange(comm, tensor):
    if comm.rank:
        tensor.copy_(comm.exchange(tensor, 0, torch.empty_like(tensor), 0))
    else:
        recv_adds(comm, tensor, range(1, comm.world_size))
        for dst in range(1, comm.world_size):
            comm.send(tensor, dst)


def one_hub_after_another(comm, tensor):
    """The last rank adds up."""
    hub = comm.world_size - 1
    if comm.rank < hub:
        comm.send(tensor, hub)
        comm.recv(tensor, hub)
        return
    for src in range(hub):
        comm.recv_add(tensor, src)
    for dst in range(hub):
        comm.send(tensor, dst)


def the_sum_so_far(comm, tensor):
    """Each rank gets the sum of the ranks up to its own."""
    if comm.rank:
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    for src in range(1, comm.world_size):
        comm.recv_add(tensor, src)
        comm.send(tensor, src)


def rank_0_makes_a_new_tensor(comm, tensor):
    if comm.rank:
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    total = tensor
    for src in range(1, comm.world_size):
        total = total + comm.recv(torch.empty_like(tensor), src)
    for dst in range(1, comm.world_size):
        comm.send(total, dst)


def in_two_halves(comm, tensor):
    middle = len(tensor) // 2
    through_rank_0(comm, tensor[:middle])
    through_rank_0(comm, tensor[middle:])


def to_a_tree_and_back(comm, tensor):
    collectives.reduce(comm, tensor, 0)
    collectives.broadcast(comm, tensor, 0)


def waits_for_all(comm, tensor):
    comm.barrier()
    through_rank_0(comm, tensor)


def takes_the_mean(comm, tensor):
    through_rank_0(comm, tensor)
    tensor /= comm.world_size


def the_largest(comm, tensor, others):
    for src in others:
        torch.maximum(tensor, comm.recv(torch.empty_like(tensor), src), out=tensor)


def sends_back_the_first_addend(comm, tensor):
    own = tensor.clone()
    through_rank_0(comm, tensor)
    if comm.rank == comm.world_size - 1:
        tensor -= own


RIGHT = [
    *map(to_rank_0_and_back, (whoever_comes_first, recv_adds, stacks_then_sums, folds)),
    to_rank_0_and_back(in_float64, lambda *ends: reversed(range(*ends))),
    others_exchange,
]
WRONG = [
    (one_hub_after_another, "traffic.off_target"),
    (the_sum_so_far, "value.wrong"),
    (rank_0_makes_a_new_tensor, "value.unchanged"),
    (in_two_halves, "traffic.off_target"),
    (to_a_tree_and_back, "traffic.off_target"),
    (waits_for_all, "traffic.barrier"),
    (takes_the_mean, "sum.mean"),
    (to_rank_0_and_back(the_largest), "value.numbers"),
    (sends_back_the_first_addend, "sum.own_missing"),
]


ANSWERS = [Answers(check.naive.all_reduce, RIGHT, WRONG, 4)]
