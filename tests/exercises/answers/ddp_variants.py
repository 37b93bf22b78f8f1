"""More answers to ``check.ddp``: right ones in unusual forms, wrong ones that look right."""

from functools import partial

import torch
from graded import Answers
from ranks import travel_by_value
from torch.nn import functional

from labkit.collectives import ring_all_reduce
from workbook import check

travel_by_value(__name__)


# my_buckets(sizes_bytes, cap_bytes, first_cap_bytes)


# average_gradients(comm, model, inputs, targets, batch_size)


def with_autograd_grad(comm, model, inputs, targets, batch_size):
    parameters = list(model.parameters())
    loss = functional.nll_loss(model(inputs).log_softmax(1), targets, reduction="none").sum()
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        parameter.grad = ring_all_reduce(comm, gradient.clone()) / batch_size


# watch(parameters, ready)


def with_partial(parameters, ready):
    def report(index, parameter):
        ready(index)

    return tuple(
        parameter.register_post_accumulate_grad_hook(partial(report, index))
        for index, parameter in enumerate(parameters)
    )


ANSWERS = [
    Answers(check.ddp.average, [with_autograd_grad], [], on=4),
    Answers(check.ddp.hooks, [with_partial], []),
]
