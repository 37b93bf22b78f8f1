"""Answers to ``check.ddp``."""

import torch
from graded import Answers
from ranks import travel_by_value
from torch.nn import functional

from labkit import check
from labkit.collectives import ring_all_reduce
from labkit.schedules.bucket_assignment import assign_buckets

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
WRONG_BUCKETS = [
    (buckets_that(lambda held, size, cap: held >= cap, order=list), "buckets.forward"),
    (buckets_that(lambda held, size, cap: held >= cap, first=False), "buckets.first_cap"),
    (buckets_that(lambda held, size, cap: held + size > cap), "buckets.closed_before"),
    (buckets_that(lambda held, size, cap: held > cap), "buckets.closed_late"),
    (lambda *args: right_rule(*args)[:-1], "buckets.rest_lost"),
    (lambda *args: [*right_rule(*args), []][-9:], "buckets.empty"),
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


# Accumulation


def accumulates(comm, model, micro_batches, batch_size):
    for inputs, targets in micro_batches:
        backward(model, inputs, targets, batch_size)
    sum_all(comm, model)


def sums_each_time(comm, model, micro_batches, batch_size):
    for inputs, targets in micro_batches:
        averages(comm, model, inputs, targets, batch_size)


def zeroes_in_between(comm, model, micro_batches, batch_size):
    for inputs, targets in micro_batches:
        model.zero_grad()
        backward(model, inputs, targets, batch_size)
    sum_all(comm, model)


def sums_too_early(comm, model, micro_batches, batch_size):
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        if number == len(micro_batches):
            sum_all(comm, model)
        backward(model, inputs, targets, batch_size)


def averages_micro_batches(comm, model, micro_batches, batch_size):
    for inputs, targets in micro_batches:
        backward(model, inputs, targets, 3 * comm.world_size, reduction="mean")
    sum_all(comm, model)


def adds_means(comm, model, micro_batches, batch_size):
    for inputs, targets in micro_batches:
        backward(model, inputs, targets, reduction="mean")
    sum_all(comm, model)


def never_sums(comm, model, micro_batches, batch_size):
    for inputs, targets in micro_batches:
        backward(model, inputs, targets, batch_size)


def never_divides(comm, model, micro_batches, batch_size):
    accumulates(comm, model, micro_batches, 1)


def right_but_three_times_the_messages(comm, model, micro_batches, batch_size):
    total = [0, 0, 0, 0]
    for inputs, targets in micro_batches:
        model.zero_grad()
        averages(comm, model, inputs, targets, batch_size)
        total = [held + p.grad for held, p in zip(total, model.parameters())]
    for held, parameter in zip(total, model.parameters()):
        parameter.grad = held


def divides_by_micro_batches(comm, model, micro_batches, batch_size):
    accumulates(comm, model, micro_batches, batch_size * len(micro_batches))


WRONG_ACCUMULATIONS = [
    (sums_each_time, "gradient.summed_again"),
    (zeroes_in_between, "gradient.last_only"),
    (sums_too_early, "gradient.last_missing"),
    (averages_micro_batches, "gradient.micro_batches_alike"),
    (adds_means, "gradient.sum_of_micro_means"),
    (divides_by_micro_batches, "gradient.twice_by_micro_batches"),
    (never_sums, "gradient.own_share"),
    (never_divides, "gradient.sum"),
    (right_but_three_times_the_messages, "traffic.off_target"),
]


# The sampler


def shuffled(num_samples, seed):
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()


def padded(order, world_size):
    missing = -len(order) % world_size
    return order + (order * missing)[:missing]


def samples(comm, num_samples, epoch, seed):
    order = padded(shuffled(num_samples, seed + epoch), comm.world_size)
    return order[comm.rank :: comm.world_size]


def forgets_the_epoch(comm, num_samples, epoch, seed):
    return samples(comm, num_samples, 0, seed)


def does_not_shuffle(comm, num_samples, epoch, seed):
    return padded(list(range(num_samples)), comm.world_size)[comm.rank :: comm.world_size]


def does_not_pad(comm, num_samples, epoch, seed):
    return shuffled(num_samples, seed + epoch)[comm.rank :: comm.world_size]


def drops_the_rest(comm, num_samples, epoch, seed):
    order = shuffled(num_samples, seed + epoch)
    return order[: num_samples - num_samples % comm.world_size][comm.rank :: comm.world_size]


def takes_a_block(comm, num_samples, epoch, seed):
    order = padded(shuffled(num_samples, seed + epoch), comm.world_size)
    size = len(order) // comm.world_size
    return order[comm.rank * size :][:size]


def shuffles_by_rank(comm, num_samples, epoch, seed):
    return samples(comm, num_samples, epoch, seed + comm.rank)


def pads_with_the_last(comm, num_samples, epoch, seed):
    order = shuffled(num_samples, seed + epoch)
    order += [order[-1]] * (-num_samples % comm.world_size)
    return order[comm.rank :: comm.world_size]


def counts_from_one(comm, num_samples, epoch, seed):
    return [index + 1 for index in samples(comm, num_samples, epoch, seed)]


def sorts_its_share(comm, num_samples, epoch, seed):
    return sorted(samples(comm, num_samples, epoch, seed))


def takes_the_next_ranks(comm, num_samples, epoch, seed):
    order = padded(shuffled(num_samples, seed + epoch), comm.world_size)
    return order[(comm.rank + 1) % comm.world_size :: comm.world_size]


def shuffles_with_another_generator(comm, num_samples, epoch, seed):
    order = sorted(range(num_samples), key=lambda index: (index * 7 + seed + epoch) % 13)
    return padded(order, comm.world_size)[comm.rank :: comm.world_size]


WRONG_SAMPLES = [
    (forgets_the_epoch, "sampler.epoch"),
    (does_not_shuffle, "sampler.not_shuffled"),
    (does_not_pad, "sampler.not_padded"),
    (drops_the_rest, "sampler.dropped"),
    (takes_a_block, "sampler.block"),
    (shuffles_by_rank, "sampler.seed_by_rank"),
    (pads_with_the_last, "sampler.padding"),
    (counts_from_one, "value.differs", "it is [1, 2, 10, 7], expected [0, 1, 9, 6]"),
    (takes_the_next_ranks, "sampler.other_rank"),
    (shuffles_with_another_generator, "value.differs"),
    (sorts_its_share, "sampler.order"),
]


ANSWERS = [
    Answers(check.ddp.buckets, [right_rule, assign_buckets], WRONG_BUCKETS),
    Answers(check.ddp.average, [averages], WRONG_AVERAGES),
    # Three ranks would hide whether the sum was divided by them or by the three micro-batches.
    Answers(check.ddp.accumulate, [accumulates], WRONG_ACCUMULATIONS, 4),
    Answers(check.ddp.sampler, [samples], WRONG_SAMPLES),
]
