"""Answers to no particular exercise: what every check has to notice."""

from functools import partial
from unittest import mock

import torch
from graded import Answers, ends
from ranks import travel_by_value

from labkit import collectives
from labkit.costs.traffic import naive_all_reduce_cost
from workbook import check
from workbook.exercises.grader import on_ranks, solved
from workbook.exercises.grader.exercise import same_bits

travel_by_value(__name__)


def _target(rank, case):
    peers = {0} if rank else range(1, case.world_size)
    return case.target(naive_all_reduce_cost, rank, peers=peers)


ALL_REDUCE = check.Exercise(
    "a sum through rank 0", lambda rank, case: case.total(), target=_target, rule=same_bits
)


def all_reduce(fn, world_sizes=(2, 3, 4)):
    return check.grade(fn, ALL_REDUCE, world_sizes)


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


# On ranks: naive.all_reduce(comm, tensor)


def then(change, before=None):
    """The right sum, but with a change before or after it."""

    def fn(comm, tensor):
        if before is not None:
            before(comm, tensor)
        through_rank_0(comm, tensor)
        change(comm, tensor)

    return fn


def adds_up_over_calls(calls, comm, tensor):
    through_rank_0(comm, tensor)
    calls.append(1)
    tensor += len(calls) > 1


def only_known_sizes(comm, tensor):
    if tensor.numel() in (96, 10, 2, 1, 0):
        through_rank_0(comm, tensor)


def twice_its_rank(fn, world_sizes=(2, 3, 4)):
    """``fn(comm)``: a number."""
    fields = {"inputs": lambda rank, case: (), "signature": "comm", "written": None}
    exercise = check.Exercise("twice", lambda rank, case: 2 * rank, **fields)
    return check.grade(fn, exercise, world_sizes)


# In no rank


def totals(fn):
    """``fn(numbers, start)``: the running totals."""
    with mock.patch.object(on_ranks, "ALONE_S", 1.0):
        return _totals(fn)


@solved(((1, 2), 0), ((5,), 1), ((2, 2), 1), mistakes={})
def _totals(numbers, start):
    return [start + sum(numbers[: place + 1]) for place in range(len(numbers))]


def generated(numbers, start):
    for number in numbers:
        start += number
        yield start


def without_end(numbers, start):
    while True:
        start += 1


def keeps_a_list(numbers, start, found=[]):  # noqa: B006
    found += generated(numbers, start)
    return found[-len(numbers) :] if len(found) < 6 else found


ANSWERS = [
    Answers(
        all_reduce,
        [partial(collectives.naive_all_reduce)],
        [
            then(lambda comm, tensor: tensor.mul_(1 + 5e-5)),
            partial(adds_up_over_calls, []),
            only_known_sizes,
        ],
    ),
    Answers(twice_its_rank, [], [lambda comm: comm.rank]),
    Answers(
        totals,
        [lambda n, s: torch.tensor([*generated(n, s)])],
        [ends(without_end), keeps_a_list, lambda n, s: [str(t) for t in generated(n, s)]],
    ),
]
