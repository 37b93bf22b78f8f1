"""Answers to ``check.ddp``."""

import functools

import torch
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


def forgets_the_rest(sizes, cap, first_cap):
    found, filling, limit = [], [], first_cap
    for index in reversed(range(len(sizes))):
        filling.append(index)
        if sum(sizes[i] for i in filling) >= limit:
            found.append(filling)
            filling, limit = [], cap
    return found


def begins_an_empty_one(sizes, cap, first_cap):
    found, limit = [[]], first_cap
    for index in reversed(range(len(sizes))):
        found[-1].append(index)
        if sum(sizes[i] for i in found[-1]) >= limit:
            found.append([])
            limit = cap
    return found


def counts_from_the_end(sizes, *caps):
    return [[len(sizes) - 1 - i for i in bucket] for bucket in right_rule(sizes, *caps)]


WRONG_BUCKETS = [
    (buckets_that(lambda held, size, cap: held >= cap, order=list), "buckets.forward"),
    (buckets_that(lambda held, size, cap: held >= cap, first=False), "buckets.first_cap"),
    (buckets_that(lambda held, size, cap: held + size > cap), "buckets.closed_before"),
    (buckets_that(lambda held, size, cap: held > cap), "buckets.closed_late"),
    (forgets_the_rest, "buckets.rest_lost"),
    (begins_an_empty_one, "buckets.empty"),
    (counts_from_the_end, "buckets.numbers"),
    (lambda *args: right_rule(*args)[:-1], "answer.wrong"),
    (lambda *args: [*right_rule(*args), []][-9:], "answer.wrong"),
    (lambda *args: right_rule(*args)[::-1], "buckets.order"),
    (lambda *args: [sorted(b) for b in right_rule(*args)], "buckets.order_inside"),
    (lambda sizes, cap, first: right_rule(sizes, first, first), "buckets.first_cap_for_all"),
    (lambda sizes, *caps: [[0], *right_rule(sizes, *caps)], "answer.wrong"),
    (lambda *args: None, "answer.nothing"),
    (lambda sizes, cap: [], "answer.raised"),
]


# Gradients of uneven shares


def backward(model, inputs, targets, divisor=1.0, reduction="sum"):
    (functional.cross_entropy(model(inputs), targets, reduction=reduction) / divisor).backward()


def sum_all(comm, model):
    for parameter in model.parameters():
        ring_all_reduce(comm, parameter.grad)


def averages(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    sum_all(comm, model)


def sums(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, 1)


def means_of_means(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, max(len(targets), 1) * comm.world_size)


def sums_of_means(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, max(len(targets), 1))


def divides_by_ranks(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, comm.world_size)


def divides_twice(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, batch_size * comm.world_size)


def sums_nothing(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)


def divides_by_none(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets)
    for parameter in model.parameters():
        parameter.grad /= len(targets)
    sum_all(comm, model)


def sits_out(comm, model, inputs, targets, batch_size):
    if len(targets):
        averages(comm, model, inputs, targets, batch_size)


def leaves_none(comm, model, inputs, targets, batch_size):
    if len(targets):
        backward(model, inputs, targets, batch_size)


def sums_twice(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, batch_size)
    for parameter in model.parameters():
        ring_all_reduce(comm, torch.zeros_like(parameter))


def sums_the_first_alone(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    ring_all_reduce(comm, next(model.parameters()).grad)


def reduces_to_rank_0(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, batch_size)
    for parameter in model.parameters():
        total = ring_all_reduce(comm, parameter.grad.clone())
        if comm.rank == 0:
            parameter.grad = total


def keeps_its_mean(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets, max(len(targets), 1))


def keeps_its_sum(comm, model, inputs, targets, batch_size):
    backward(model, inputs, targets)


WRONG_AVERAGES = [
    (keeps_its_mean, "gradient.own_mean"),
    (keeps_its_sum, "gradient.own_sum"),
    (sums, "gradient.sum"),
    (means_of_means, "gradient.mean_of_means"),
    (sums_of_means, "gradient.sum_of_means"),
    (divides_by_ranks, "gradient.over_ranks"),
    (divides_twice, "gradient.twice_by_ranks"),
    (sums_nothing, "gradient.own_share"),
    (divides_by_none, "gradient.nan"),
    (sits_out, "run.stuck"),
    (leaves_none, "gradient.none"),
    (sums_twice, "traffic.off_target"),
    (sums_the_first_alone, "value.numbers"),
    (reduces_to_rank_0, "value.one_right"),
]


# Hooks on parameters


def watches(parameters, ready):
    return [
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: ready(index))
        for index, parameter in enumerate(parameters)
    ]


def shares_the_loop_variable(parameters, ready):
    handles = []
    for index, parameter in enumerate(parameters):
        hook = lambda _: ready(index)  # noqa: B023, E731
        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    return handles


def uses_tensor_hooks(parameters, ready):
    return [p.register_hook(lambda _, i=i: ready(i)) for i, p in enumerate(parameters)]


def calls_ready_itself(parameters, ready):
    handles = watches(parameters, ready)
    for index in range(len(parameters)):
        ready(index)
    return handles


def keeps_the_handles(parameters, ready):
    watches(parameters, ready)


def numbers_from_the_end(parameters, ready):
    return watches(parameters[::-1], ready)


def gives_the_parameter(parameters, ready):
    return [p.register_post_accumulate_grad_hook(ready) for p in parameters]


def hooks_the_weights_alone(parameters, ready):
    weights = [(i, p) for i, p in enumerate(parameters) if p.dim() > 1]
    return [p.register_post_accumulate_grad_hook(lambda _, i=i: ready(i)) for i, p in weights]


def hooks_twice(parameters, ready):
    return watches(parameters, ready) + watches(parameters, ready)


def hooks_once(parameters, ready):
    handles = []

    def once(index):
        handles[index].remove()
        ready(index)

    handles += watches(parameters, once)
    return handles


def returns_the_first_handle(parameters, ready):
    return watches(parameters, ready)[:1]


def hooks_nothing(parameters, ready):
    return []


def passes_the_parameter_on(parameters, ready):
    return [
        p.register_post_accumulate_grad_hook(functools.partial(ready, i))
        for i, p in enumerate(parameters)
    ]


WRONG_HOOKS = [
    (passes_the_parameter_on, "hooks.arguments", "with 2 arguments"),
    (shares_the_loop_variable, "hooks.last_index"),
    (uses_tensor_hooks, "hooks.too_early"),
    (calls_ready_itself, "hooks.at_once"),
    (keeps_the_handles, "hooks.no_handles"),
    (numbers_from_the_end, "hooks.numbers"),
    (gives_the_parameter, "hooks.index"),
    (hooks_the_weights_alone, "hooks.missing"),
    (hooks_twice, "hooks.twice"),
    (hooks_once, "hooks.once"),
    (returns_the_first_handle, "hooks.stay"),
    (hooks_nothing, "hooks.nothing"),
]


ANSWERS = [
    Answers(check.ddp.buckets, [right_rule, assign_buckets], WRONG_BUCKETS),
    Answers(check.ddp.average, [averages], WRONG_AVERAGES),
    Answers(check.ddp.hooks, [watches], WRONG_HOOKS),
]
