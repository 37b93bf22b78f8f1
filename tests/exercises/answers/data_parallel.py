"""Answers to ``check.data_parallel``."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from graded import Answers
from torch.nn import functional

from workbook import check


def copies(model, num_devices):
    return [model, *(copy.deepcopy(model) for _ in range(num_devices - 1))]


# gather(outputs, targets)


def in_float64(outputs, targets):
    leaves = [output.detach().double().requires_grad_() for output in outputs]
    loss = functional.nll_loss(torch.cat(leaves).log_softmax(-1), targets)
    loss.backward()
    return {"loss": loss.detach(), "gradients": [leaf.grad for leaf in leaves]}.values()


def with_means(outputs, targets):
    leaves = [output.detach().requires_grad_() for output in outputs]
    own = targets.split([len(output) for output in outputs])
    loss = sum(map(functional.cross_entropy, leaves, own)) / len(outputs)
    return loss, list(torch.autograd.grad(loss, leaves))


def runs_on(outputs, targets):
    for output in outputs:
        output.retain_grad()
    loss = functional.cross_entropy(torch.cat(outputs), targets)
    loss.backward()
    return loss, [output.grad for output in outputs]


# parallel_apply(functions, inputs)


def runs(functions, inputs, mode=torch.is_grad_enabled):
    grad = mode()

    def with_mode(function, argument):
        with torch.set_grad_enabled(grad):
            return function(argument)

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(with_mode, functions, inputs))


def uses_no_threads(functions, inputs):
    return [function(argument) for function, argument in zip(functions, inputs)]


def raises_its_own(functions, inputs):
    try:
        return runs(functions, inputs)
    except KeyError:
        raise RuntimeError("a thread failed") from None


# reduce(gradients)


def adds(gradients):
    sums = []
    for column in zip(*gradients):
        there = [gradient for gradient in column if gradient is not None]
        sums.append(sum(there[1:], there[0]) if there else None)
    return sums


ANSWERS = [
    Answers(
        check.data_parallel.replicate,
        [copies],
        [
            lambda model, num_devices: [model] * num_devices,
            lambda model, num_devices: copies(model, num_devices + 1)[1:],
            lambda model, num_devices: [model, *map(copy.copy, [model] * (num_devices - 1))],
            lambda model, num_devices: [
                model,
                *(c.train() for c in copies(model, num_devices)[1:]),
            ],
        ],
        on=1,
    ),
    Answers(
        check.data_parallel.gather,
        [in_float64],
        [with_means, runs_on],
        on=1,
    ),
    Answers(
        check.data_parallel.parallel_apply,
        [runs],
        [uses_no_threads, raises_its_own, partial(runs, mode=lambda: True)],
    ),
    Answers(
        check.data_parallel.reduce,
        [adds],
        [lambda gradients: gradients[0]],
    ),
]
