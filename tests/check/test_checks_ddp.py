"""The checks of page 03: each accepts its solution, and names the mistake in each wrong answer."""

from functools import partial

import pytest
import torch
from graded import in_shared_runs
from ranks import travel_by_value
from torch.nn import functional

from labkit import check
from labkit.collectives import ring_all_reduce
from labkit.schedules.buckets import assign_buckets

travel_by_value(__name__)


def told(verdict):
    assert not verdict
    return " ".join(verdict.notes)


# Buckets


def buckets_that(close, first=True, order=reversed):
    """Wrong rules: ``close(held, size, cap)`` before a parameter joins."""

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
    (buckets_that(lambda held, size, cap: held >= cap, order=list), "it goes forward"),
    (buckets_that(lambda held, size, cap: held >= cap, first=False), "a cap of its own"),
    (buckets_that(lambda held, size, cap: held + size > cap), "not before it would hold more"),
    (buckets_that(lambda held, size, cap: held > cap), "and need not hold more"),
    (lambda *args: right_rule(*args)[:-1], "what is left at the end is a bucket"),
    (lambda *args: [*right_rule(*args), []][-9:], "an empty bucket is none"),
    (lambda *args: right_rule(*args)[::-1], "the first to leave comes last"),
    (lambda *args: [sorted(b) for b in right_rule(*args)], "the last parameter comes first"),
    (lambda sizes, cap, first: right_rule(sizes, first, first), "for the first bucket alone"),
    (lambda sizes, *caps: [[0], *right_rule(sizes, *caps)], "yours says [[0], [6, 5]"),
    (lambda *args: None, "yours says None"),
    (lambda sizes, cap: [], "takes 2 positional arguments but 3 were given"),
]


def test_the_rule_of_buckets_passes(capsys):
    assert check.ddp.buckets(right_rule)
    assert check.ddp.buckets(assign_buckets)
    assert "all 4 answers are right" in capsys.readouterr().out


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_BUCKETS)
def test_wrong_buckets_are_named(wrong, sentence):
    assert sentence in told(check.ddp.buckets(wrong))


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


WRONG_AVERAGES = [
    (sums, "it is the sum over the samples"),
    (means_of_means, "a mean of means is not the mean"),
    (sums_of_means, "it is a sum of the ranks' means"),
    (divides_by_ranks, "divided by the number of ranks"),
    (divides_twice, "it is divided twice"),
    (sums_nothing, "nothing was summed over the ranks"),
    (divides_by_none, "a gradient is NaN"),
    (sits_out, "rank 2"),
    (leaves_none, "rank 2 raised ValueError: a parameter has no gradient"),
    (sums_twice, "messages"),
    (sums_the_first_alone, "rank 0 is the first that is wrong, in entry 1"),
    (reduces_to_rank_0, "Rank 0 alone has the right result"),
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
    (sums_each_time, "what they had summed before is summed again"),
    (zeroes_in_between, "only the last micro-batch is in it"),
    (sums_too_early, "the last micro-batch is not in it"),
    (averages_micro_batches, "micro-batches count alike"),
    (adds_means, "a sum of the micro-batches' means"),
    (divides_by_micro_batches, "by the samples and by the micro-batches"),
    (never_sums, "nothing was summed over the ranks"),
    (never_divides, "it is the sum over the samples"),
    (right_but_three_times_the_messages, "messages"),
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
    (forgets_the_epoch, "the order is that of epoch 0"),
    (does_not_shuffle, "shuffle them"),
    (does_not_pad, "pad until all have equally many"),
    (drops_the_rest, "the rest was dropped"),
    (takes_a_block, "and no block"),
    (shuffles_by_rank, "each rank shuffles with another seed"),
    (pads_with_the_last, "the padding is other samples"),
    (counts_from_one, "it has [1, 2, 10, 7], where [0, 1, 9, 6] is due"),
    (takes_the_next_ranks, "another rank's"),
    (shuffles_with_another_generator, "wrong, in entry 0: it has ["),
    (sorts_its_share, "in another order"),
]


CHECKS = {
    "average": (check.ddp.average, averages, 3, WRONG_AVERAGES),
    # With as many ranks as micro-batches it could not tell by which of them was divided.
    "accumulate": (check.ddp.accumulate, accumulates, 4, WRONG_ACCUMULATIONS),
    "sampler": (check.ddp.sampler, samples, 3, WRONG_SAMPLES),
}
# What raises or stands still ends its run; all others share one.
BREAK_OFF = {divides_by_none, sits_out, leaves_none}


@pytest.fixture(scope="module")
def verdicts():
    found = {}
    for name, (checker, right, world_size, wrong) in CHECKS.items():
        # On four ranks; test_solutions has the page's on all world sizes.
        found[name] = partial(checker, right, world_sizes=(4,))
        for fn, _ in wrong:
            if fn not in BREAK_OFF:
                found[fn] = partial(checker, fn, world_sizes=(world_size,))
    return in_shared_runs(found)


@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_pass(name, verdicts):
    assert verdicts[name].passed, verdicts[name]


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [(name, *case) for name, (*_, cases) in CHECKS.items() for case in cases],
)
def test_a_wrong_answer_is_named(name, wrong, sentence, verdicts):
    checker, _, world_size, _ = CHECKS[name]
    alone = wrong in BREAK_OFF
    verdict = checker(wrong, world_sizes=(world_size,)) if alone else verdicts[wrong]
    assert sentence in told(verdict)
