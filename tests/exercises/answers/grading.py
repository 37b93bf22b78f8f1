"""Answers to no particular exercise: what every check has to notice."""

from functools import partial
from unittest import mock

import torch
from graded import Answers, ends

from labkit.collectives import naive_all_reduce
from workbook import check
from workbook.exercises.grader import on_ranks, solved

# On ranks: naive_all_reduce(comm, tensor)


def adds_up_over_calls(calls, comm, tensor):
    naive_all_reduce(comm, tensor)
    calls.append(1)
    tensor += len(calls) > 1


def only_known_sizes(comm, tensor):
    if tensor.numel() in (96, 10, 2, 1, 0):
        naive_all_reduce(comm, tensor)


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
        check.ring.naive_all_reduce,
        [],
        [partial(adds_up_over_calls, []), only_known_sizes],
    ),
    Answers(
        totals,
        [lambda n, s: torch.tensor([*generated(n, s)])],
        [ends(without_end), keeps_a_list],
    ),
]
