"""Answers to ``check.ddp``."""

import functools

from graded import Answers
from ranks import travel_by_value
from torch.nn import functional

from labkit.collectives import ring_all_reduce
from labkit.schedules.bucket_assignment import assign_buckets
from workbook import check

travel_by_value(__name__)


# Buckets


def buckets_that(close, first=True, order=reversed):
    """A rule that closes a bucket if ``close(held, size, cap)`` before a parameter joins it."""

    def fn(sizes, cap, first_cap):
        found, filling = [], []
        limit = first_cap if first else cap
        for index in order(range(len(sizes))):
            if filling and close(sum(sizes[i] for i in filling), sizes[index], limit):
                found.append(filling)
                filling, limit = [], cap
            filling.append(index)
        return [*found, filling]

    return fn


right_rule = buckets_that(lambda held, size, cap: held >= cap)


# Gradients of uneven shares


def backward(model, inputs, targets, divisor=1.0, reduction="sum"):
    (functional.cross_entropy(model(inputs), targets, reduction=reduction) / divisor).backward()


def sum_all(comm, model):
    for parameter in model.parameters():
        ring_all_reduce(comm, parameter.grad)


def averages(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    sum_all(comm, model)


def divides_twice(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, batch_size * comm.world_size)


def reduces_to_rank_0(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    for parameter in model.parameters():
        total = ring_all_reduce(comm, parameter.grad.clone())
        if comm.rank == 0:
            parameter.grad = total


# Hooks on parameters


def watches(parameters, ready):
    return [
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: ready(index))
        for index, parameter in enumerate(parameters)
    ]


def gives_the_parameter(parameters, ready):
    return [p.register_post_accumulate_grad_hook(ready) for p in parameters]


def passes_the_parameter_on(parameters, ready):
    return [
        p.register_post_accumulate_grad_hook(functools.partial(ready, i))
        for i, p in enumerate(parameters)
    ]


ANSWERS = [
    Answers(
        check.ddp.buckets,
        [assign_buckets],
        [
            buckets_that(lambda held, size, cap: held >= cap, order=list),
            lambda *args: right_rule(*args)[:-1],
            lambda sizes, cap: [],
        ],
    ),
    Answers(check.ddp.average, [averages], [divides_twice, reduces_to_rank_0]),
    Answers(check.ddp.hooks, [watches], [passes_the_parameter_on, gives_the_parameter]),
]
