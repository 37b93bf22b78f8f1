"""Answers to ``check.naive``, and things that are not an answer at all."""

import sys
import threading
from functools import partial

import torch
from graded import Answers
from ranks import travel_by_value

from labkit import collectives
from workbook import check

travel_by_value(__name__)


def through_rank_0(comm, tensor, first=1, add=True, back=True):
    if comm.rank == 0:
        incoming = torch.empty_like(tensor)
        for src in range(first, comm.world_size):
            comm.recv(incoming, src)
            tensor.copy_(tensor + incoming if add else incoming)
        for dst in range(first, comm.world_size if back else 0):
            comm.send(tensor, dst)
    else:
        comm.send(tensor, 0)
        if back:
            comm.recv(tensor, 0)


def rank_0_forgets_itself(comm, tensor):
    if comm.rank == 0:
        tensor.zero_()
    through_rank_0(comm, tensor)


def adds_what_comes_back(comm, tensor):
    own = tensor.clone()
    through_rank_0(comm, tensor)
    if comm.rank:
        tensor += own


def everyone_to_everyone(comm, tensor):
    own = tensor.clone()
    for step in range(1, comm.world_size):
        incoming = torch.empty_like(tensor)
        dst, src = (comm.rank + step) % comm.world_size, (comm.rank - step) % comm.world_size
        comm.exchange(own, dst, incoming, src)
        tensor += incoming


def sends_back_twice(comm, tensor):
    through_rank_0(comm, tensor)
    through_rank_0(comm, tensor.clone())


def stops_at_rank_1(comm, tensor):
    return tensor[comm.rank + 9 * (comm.rank == 1)] if len(tensor) == 10 else None


ANSWERS = [
    Answers(
        check.naive.all_reduce,
        [collectives.naive_all_reduce, through_rank_0],
        [
            (partial(through_rank_0, back=False), "value.one_right", "not peers.bottleneck"),
            (partial(through_rank_0, add=False), "sum.overwritten"),
            (partial(through_rank_0, first=2), "run.stuck"),
            (rank_0_forgets_itself, "sum.own_missing"),
            (adds_what_comes_back, "sum.own_twice", "rank 1 is the first with a wrong result"),
            (everyone_to_everyone, "traffic.off_target", "3, where the target is 3 1 1 1"),
            (collectives.ring_all_reduce, "peers.wrong", "rank 1 sends to rank 2; allowed: 0"),
            (sends_back_twice, "traffic.doubled"),
            # A check never raises.
            (None, "fn.missing"),
            (lambda comm: None, "fn.signature"),
            (partial(stops_at_rank_1, threading.Lock()), "fn.signature"),
            (threading.Lock().acquire, "fn.cannot_travel"),
            (stops_at_rank_1, "run.error"),
            (lambda comm, tensor: sys.exit(0), "run.error"),
            (lambda comm, tensor: comm, "run.error"),
        ],
        on=4,
    ),
    Answers(
        partial(
            check.grade,
            exercise=check.Exercise("broken", expected=lambda rank, case: 1 / 0),
            world_sizes=(2,),
        ),
        [],
        [(through_rank_0, "check.broke")],
    ),
]
