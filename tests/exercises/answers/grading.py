"""Answers to no particular exercise: what every check has to notice."""

import inspect
import itertools
import sys
from collections import deque
from functools import partial
from unittest import mock

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit import collectives
from labkit.collectives import naive
from labkit.costs.traffic import naive_all_reduce_cost
from workbook import check
from workbook.exercises.grader import in_process

travel_by_value(__name__)


def _target(rank, case):
    peers = {0} if rank else range(1, case.world_size)
    return case.target(naive_all_reduce_cost, rank, peers=peers)


ALL_REDUCE = check.Exercise(
    "a sum through rank 0", lambda rank, case: case.total(), target=_target, same_bits=True
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


def with_numpy(comm, tensor):
    """As an array, whose empty tensors have other strides."""
    array = tensor.numpy()
    if comm.rank:
        comm.send(torch.from_numpy(array), 0)
        comm.recv(torch.from_numpy(array), 0)
        return
    incoming = torch.empty_like(tensor)
    for source in reversed(range(1, comm.world_size)):
        array += comm.recv(incoming, source).numpy()
    for destination in range(1, comm.world_size):
        comm.send(torch.from_numpy(array), destination)


def in_another_order(tensor, comm):
    through_rank_0(comm, tensor)


def by_keyword(*, tensor, comm):
    through_rank_0(comm, tensor)


def leaves_out_empty_tensors(comm, tensor):
    if tensor.numel():
        through_rank_0(comm, tensor)


def by_a_copy_of_the_source(comm, tensor):
    names = dict(vars(naive))
    exec(inspect.getsource(collectives.naive_all_reduce), names)
    names["naive_all_reduce"](comm, tensor)


def by_its_name(comm, tensor):
    getattr(sys.modules["labkit.collectives"], "naive_" + "all_reduce")(comm, tensor)


def then(change, before=None):
    """The right sum, but with a change before or after it."""

    def fn(comm, tensor):
        if before is not None:
            before(comm, tensor)
        through_rank_0(comm, tensor)
        change(comm, tensor)

    return fn


def nothing(comm, tensor):
    pass


def drops_tiny_numbers(comm, tensor):
    tensor[tensor.abs() < 1e-4] = 0


def remembers(kept, comm, tensor):
    """Give the first result of each shape for all later calls."""
    through_rank_0(comm, tensor)
    tensor.copy_(kept.setdefault(tensor.shape, tensor.clone()))


def adds_up_over_calls(calls, comm, tensor):
    through_rank_0(comm, tensor)
    calls.append(1)
    tensor += len(calls) > 1


def fails_the_second_time(calls, comm, tensor):
    through_rank_0(comm, tensor)
    calls.append(1)
    return [0][len(calls) - 1]


def leaves_the_raise(comm, tensor):
    own = tensor.clone()
    through_rank_0(comm, tensor)
    assert own.shape == tensor.shape
    raise NotImplementedError


def unwritten(tensor):
    raise NotImplementedError


def calls_a_stub(comm, tensor):
    through_rank_0(comm, tensor)
    return unwritten(tensor)


def crashes_at_one(comm, tensor):
    own = tensor.clone()
    through_rank_0(comm, tensor)
    tensor += own / (tensor.numel() // 2 > 0)
    assert tensor.numel() != 1


def only_known_sizes(comm, tensor):
    if tensor.numel() in (96, 10, 2, 1, 0):
        through_rank_0(comm, tensor)


ON_RANKS = [
    (then(lambda comm, tensor: tensor.mul_(1 + 5e-5)), "sum.inexact"),
    (then(lambda comm, tensor: tensor.copy_(tensor.bfloat16())), "sum.rounded"),
    (then(nothing, before=drops_tiny_numbers), "sum.inexact"),
    (then(lambda comm, tensor: comm.barrier()), "traffic.barrier"),
    (partial(remembers, {}), "value.of_first_call", "value.second_call"),
    (partial(adds_up_over_calls, []), "value.second_call"),
    (partial(fails_the_second_time, []), "run.error", "run.second_call"),
    (leaves_the_raise, "stub.raise_left", "not run.error"),
    (calls_a_stub, "stub.calls_stub", "the function calls unwritten"),
    (crashes_at_one, "run.error", "sum.own_twice"),
    (only_known_sizes, "value.size_other"),
]


def twice_its_rank(fn, world_sizes=(2, 3, 4)):
    """``fn(comm)``: a number."""
    return check.returns(fn, lambda rank, case: 2 * rank, world_sizes=world_sizes)


# In no rank


def totals(fn):
    """``fn(numbers, start)``: the running totals."""
    expected = {((1, 2), 0): [1, 3], ((5,), 1): [6], ((2, 2), 1): [3, 5]}
    with mock.patch.object(in_process, "TIMEOUT_S", 1.0):
        return check.answers(fn, expected, signature="numbers, start")


def generated(numbers, start):
    for number in numbers:
        start += number
        yield start


def other_order(start, *, numbers):
    return deque(generated(numbers, start))


def without_end(numbers, start):
    while True:
        start += 1


def without_end_in_c(numbers, start):
    return sum(itertools.repeat(0)) if start else list(generated(numbers, start))


def keeps_a_list(numbers, start, found=[]):  # noqa: B006
    found += generated(numbers, start)
    return found[-len(numbers) :] if len(found) < 6 else found


def leaves(numbers, start):
    sys.exit(3)


def leaves_the_raise_here(numbers, start):
    found = list(generated(numbers, start))
    for _ in found:
        pass
    raise NotImplementedError
    return found


ANSWERS = [
    Answers(
        all_reduce,
        [
            *(with_numpy, in_another_order, by_keyword, leaves_out_empty_tensors),
            *(by_a_copy_of_the_source, by_its_name, partial(collectives.naive_all_reduce)),
        ],
        ON_RANKS,
    ),
    Answers(twice_its_rank, [], [(lambda comm: comm.rank, "value.differs", "expected 2")]),
    Answers(
        totals,
        [
            *(generated, other_order, lambda n, s: tuple(generated(n, s))),
            *(lambda n, s: np.cumsum([s, *n])[1:], lambda n, s: torch.tensor([*generated(n, s)])),
        ],
        [
            (without_end, "answer.endless", "at "),
            (without_end_in_c, "answer.endless", "without_end_in_c(numbers=(5,), start=1)"),
            (keeps_a_list, "answer.second_call"),
            (leaves, "answer.ended", "called sys.exit(3)"),
            (leaves_the_raise_here, "stub.raise_left", "not answer.raised"),
            (lambda n, s: [str(t) for t in generated(n, s)], "answer.wrong"),
        ],
    ),
]
