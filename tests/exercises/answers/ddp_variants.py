"""More answers to ``check.ddp``: right ones in unusual forms, wrong ones that look right."""

import itertools
from collections import deque
from functools import partial

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value
from torch.nn import functional

from answers.ddp import averages, backward, right_rule
from labkit.collectives import naive_all_reduce, ring_all_reduce
from workbook import check

travel_by_value(__name__)


# my_buckets(sizes_bytes, cap_bytes, first_cap_bytes)


def recursively(sizes_bytes, cap_bytes, first_cap_bytes):
    if not sizes_bytes:
        return []
    held = list(itertools.accumulate(reversed(sizes_bytes)))
    full = (place for place, total in enumerate(held) if total >= first_cap_bytes)
    closed = next(full, len(held) - 1)
    end = len(sizes_bytes) - closed - 1
    bucket = tuple(range(len(sizes_bytes) - 1, end - 1, -1))
    return [bucket, *recursively(sizes_bytes[:end], cap_bytes, cap_bytes)]


def yields_buckets(sizes_bytes, cap_bytes, first_cap_bytes):
    bucket, left = [], first_cap_bytes
    for place in range(len(sizes_bytes))[::-1]:
        bucket.append(place)
        left -= sizes_bytes[place]
        if left <= 0:
            yield tuple(bucket)
            bucket, left = [], cap_bytes
    if bucket:
        yield iter(bucket)


def with_numpy(sizes_bytes, cap_bytes, first_cap_bytes):
    order = np.arange(len(sizes_bytes))[::-1]
    sums, cuts, paid, cap = np.cumsum(np.array(sizes_bytes)[order]), [], 0, first_cap_bytes
    while (reached := np.searchsorted(sums, paid + cap)) < len(sums) - 1:
        cuts.append(reached + 1)
        paid, cap = sums[reached], cap_bytes
    return np.split(order, cuts)


def pops_from_the_end(sizes_bytes, cap_bytes, first_cap_bytes):
    buckets, caps = deque(), itertools.chain([first_cap_bytes], itertools.repeat(cap_bytes))
    while sizes_bytes:
        held, bucket, cap = 0, [], next(caps)
        while sizes_bytes and held < cap:
            held += sizes_bytes.pop()
            bucket.append(len(sizes_bytes))
        buckets.append(bucket)
    return buckets


def with_torch(sizes_bytes, cap_bytes, first_cap_bytes):
    found = right_rule(sizes_bytes, cap_bytes, first_cap_bytes)
    return [torch.tensor(bucket) for bucket in found]


def closes_by_number(sizes_bytes, cap_bytes, first_cap_bytes):
    """The cap counts parameters, not their bytes."""
    return right_rule([1] * len(sizes_bytes), cap_bytes, first_cap_bytes)


def measures_all_from_the_start(sizes_bytes, cap_bytes, first_cap_bytes):
    """The second bucket is closed when both together hold its cap."""
    buckets, filling, held, cap = [], [], 0, first_cap_bytes
    for index in reversed(range(len(sizes_bytes))):
        filling.append(index)
        held += sizes_bytes[index]
        if held >= cap:
            buckets.append(filling)
            filling, cap = [], cap + cap_bytes
    return [*buckets, filling] if filling else buckets


def keeps_the_rest_in_the_last(sizes_bytes, cap_bytes, first_cap_bytes):
    *full, last = right_rule(sizes_bytes, cap_bytes, first_cap_bytes)
    if full and sum(sizes_bytes[i] for i in last) < cap_bytes:
        full[-1] = full[-1] + last
        return full
    return [*full, last]


def one_list(sizes_bytes, cap_bytes, first_cap_bytes):
    return [*itertools.chain(*right_rule(sizes_bytes, cap_bytes, first_cap_bytes))]


def sizes_in_place_of_indices(sizes_bytes, cap_bytes, first_cap_bytes):
    found = right_rule(sizes_bytes, cap_bytes, first_cap_bytes)
    return [[sizes_bytes[index] for index in bucket] for bucket in found]


def counts_down_to_one(sizes_bytes, cap_bytes, first_cap_bytes):
    found = right_rule(sizes_bytes, cap_bytes, first_cap_bytes)
    return [[index + 1 for index in bucket] for bucket in found]


RIGHT_BUCKETS = [recursively, yields_buckets, with_numpy, pops_from_the_end, with_torch]
WRONG_BUCKETS = [
    (closes_by_number, "answer.wrong"),
    (measures_all_from_the_start, "answer.wrong"),
    (keeps_the_rest_in_the_last, "answer.wrong"),
    (one_list, "answer.wrong"),
    (sizes_in_place_of_indices, "answer.wrong"),
    (counts_down_to_one, "answer.wrong"),
    (lambda sizes, *caps: right_rule(sizes, *caps)[:-1] or [[0]], "answer.wrong"),
]


# average_gradients(comm, model, inputs, targets, batch_size)


def with_autograd_grad(comm, model, inputs, targets, batch_size):
    parameters = list(model.parameters())
    loss = functional.nll_loss(model(inputs).log_softmax(1), targets, reduction="none").sum()
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        parameter.grad = ring_all_reduce(comm, gradient.clone()) / batch_size


def weights_its_mean(comm, model, inputs, targets, batch_size):
    """A mean over no samples is NaN: such a rank contributes zeros."""
    model.zero_grad(set_to_none=False)
    if len(targets):
        (functional.cross_entropy(model(inputs), targets) * len(targets) / batch_size).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        ring_all_reduce(comm, parameter.grad)


def sums_in_a_hook(comm, model, inputs, targets, batch_size):
    def reduce_it(parameter):
        ring_all_reduce(comm, parameter.grad.div_(batch_size))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce_it)
    backward(model, inputs, targets)


def sample_by_sample(comm, model, inputs, targets, batch_size):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for sample, target in zip(inputs, targets):
        (functional.cross_entropy(model(sample), target) / batch_size).backward()
    for parameter in reversed(list(model.parameters())):
        ring_all_reduce(comm, parameter.grad)


def takes_the_mean_over_ranks(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size / comm.world_size)
    for parameter in model.parameters():
        ring_all_reduce(comm, parameter.grad, "mean")


def in_one_flat_ring(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    parameters = list(model.parameters())
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    ring_all_reduce(comm, flat)
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.grad = piece.view_as(parameter)


def makes_the_update_too(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, batch_size)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def returns_the_gradients(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    return [ring_all_reduce(comm, p.grad.clone()) for p in model.parameters()]


def through_rank_0(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    for parameter in model.parameters():
        naive_all_reduce(comm, parameter.grad)


def leaves_the_biases_out(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    for parameter in model.parameters():
        total = ring_all_reduce(comm, parameter.grad.clone())
        if parameter.dim() > 1:
            parameter.grad = total


def sums_before_backward(comm, model, inputs, targets, batch_size):
    for parameter in model.parameters():
        parameter.grad = ring_all_reduce(comm, torch.zeros_like(parameter))
    backward(model, inputs, targets, batch_size)


def weights_by_ranks_with_samples(comm, model, inputs, targets, batch_size):
    """The mean over the ranks that have samples: right if they have equally many."""
    averages(comm, model, inputs, targets, max(len(targets), 1) * (comm.world_size - 1))


def in_bfloat16(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, batch_size)
    for parameter in model.parameters():
        parameter.grad = parameter.grad.bfloat16().float()


def sums_the_loss_alone(comm, model, inputs, targets, batch_size):
    loss = functional.cross_entropy(model(inputs), targets, reduction="sum") / batch_size
    with torch.no_grad():
        total = ring_all_reduce(comm, loss.detach().clone().reshape(1))
    (loss + (total - loss.detach()).sum()).backward()


RIGHT_AVERAGES = [
    with_autograd_grad,
    weights_its_mean,
    sums_in_a_hook,
    sample_by_sample,
    takes_the_mean_over_ranks,
    in_one_flat_ring,
]
WRONG_AVERAGES = [
    (makes_the_update_too, "gradient.updated"),
    (returns_the_gradients, "gradient.own_share"),
    (through_rank_0, "traffic.off_target"),
    (leaves_the_biases_out, "value.numbers"),
    (sums_before_backward, "gradient.own_share"),
    (weights_by_ranks_with_samples, "value.numbers"),
    (in_bfloat16, "value.wrong"),
    (sums_the_loss_alone, "gradient.own_share"),
]


# watch(parameters, ready)


def with_partial(parameters, ready):
    def report(index, parameter):
        ready(index)

    return tuple(
        parameter.register_post_accumulate_grad_hook(partial(report, index))
        for index, parameter in enumerate(parameters)
    )


def from_the_last(*, parameters, ready):
    handles = {}
    for index in reversed(range(len(parameters))):
        hook = Reporter(ready, index)
        handles[index] = parameters[index].register_post_accumulate_grad_hook(hook)
    return handles


class Reporter:
    def __init__(self, ready, index):
        self.ready, self.index = ready, index

    def __call__(self, parameter):
        self.ready(self.index)


def looks_the_index_up(parameters, ready):
    place = {parameter: index for index, parameter in enumerate(parameters)}

    def hook(parameter):
        ready(place[parameter])

    return [*map(lambda p: p.register_post_accumulate_grad_hook(hook), parameters)]


def yields_the_handles(parameters, ready):
    for index, parameter in enumerate(parameters):
        yield parameter.register_post_accumulate_grad_hook(lambda _, i=index: ready(i))


def gives_a_numpy_index(parameters, ready):
    numbers = np.arange(len(parameters))

    def hook_of(number):
        return lambda parameter: ready(number)

    return [p.register_post_accumulate_grad_hook(hook_of(n)) for n, p in zip(numbers, parameters)]


RIGHT_HOOKS = [
    with_partial,
    from_the_last,
    looks_the_index_up,
    yields_the_handles,
    gives_a_numpy_index,
]


ANSWERS = [
    Answers(check.ddp.buckets, RIGHT_BUCKETS, WRONG_BUCKETS),
    Answers(check.ddp.average, RIGHT_AVERAGES, WRONG_AVERAGES, 4),
    Answers(check.ddp.hooks, RIGHT_HOOKS, []),
]
