"""Answers to ``check.data_parallel``."""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from graded import Answers
from ranks import travel_by_value
from torch.nn import functional

from workbook import check

travel_by_value(__name__)


# scatter(inputs, num_devices)


def splits(inputs, num_devices):
    return list(inputs.tensor_split(min(num_devices, len(inputs))))


def keeps_empty_parts(inputs, num_devices):
    return inputs.tensor_split(num_devices)


def drops_the_rest(inputs, num_devices):
    return list(inputs.split(max(1, len(inputs) // num_devices)))[:num_devices]


# replicate(model, num_devices)


def copies(model, num_devices):
    return [model, *(copy.deepcopy(model) for _ in range(num_devices - 1))]


def by_recursion_over_devices(model, num_devices):
    return [model] if num_devices == 1 else [*copies(model, num_devices - 1), copies(model, 2)[1]]


def repeats_the_model(model, num_devices):
    return [model] * num_devices


# gather(outputs, targets)


def in_float64(*, targets, outputs):
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


def runs(functions, inputs):
    grad = torch.is_grad_enabled()

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


def takes_means(gradients):
    return [total if total is None else total / len(gradients) for total in adds(gradients)]


def returns_one(gradients):
    return adds(gradients)[0]


ANSWERS = [
    Answers(check.data_parallel.scatter, [splits], [keeps_empty_parts, drops_the_rest]),
    Answers(
        check.data_parallel.replicate,
        [by_recursion_over_devices],
        [repeats_the_model, lambda model, num_devices: model],
        on=1,
    ),
    Answers(
        check.data_parallel.gather,
        [in_float64],
        [with_means, runs_on, lambda outputs, targets: None],
        on=1,
    ),
    Answers(check.data_parallel.parallel_apply, [runs], [uses_no_threads, raises_its_own]),
    Answers(check.data_parallel.reduce, [adds], [takes_means, returns_one]),
]
