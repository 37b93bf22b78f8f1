"""Answers to ``check.fairness``."""

import statistics

import torch
from graded import Answers

from labkit.collectives import ring_all_reduce
from workbook import check


def right(comm, tensor):
    bits = tensor.view(torch.int32)
    low = ring_all_reduce(comm, bits.clone(), "min")
    high = ring_all_reduce(comm, bits.clone(), "max")
    return torch.equal(low, high)


def always_content(comm, tensor):
    return True


def compares_sorted(comm, tensor):
    return right(comm, tensor.sort().values)


def only_rank_0_knows(comm, tensor):
    agree = right(comm, tensor)
    return agree if comm.rank == 0 else None


def returns_a_tensor(comm, tensor):
    return torch.tensor(right(comm, tensor))


# a and b in turns


def in_turns(a, b, repeats):
    pairs = []
    for number in range(repeats + 1):
        if number % 2:
            second, first = b(), a()
        else:
            first, second = a(), b()
        pairs.append((first, second))
    return pairs


def the_right_ratio(a, b, repeats):
    return statistics.median(y / x for x, y in in_turns(a, b, repeats)[1:])


def counts_the_warm_up(a, b, repeats):
    return statistics.median(y / x for x, y in in_turns(a, b, repeats))


def takes_the_lower(a, b, repeats):
    return statistics.median_low(y / x for x, y in in_turns(a, b, repeats)[1:])


# useful_rate(train_size, samples_by_rank, epoch_seconds)


def useful(train_size, samples_by_rank, epoch_seconds, middle=statistics.median):
    return min(train_size, sum(samples_by_rank)) / middle(epoch_seconds[1:])


def by_the_mean(train_size, samples_by_rank, epoch_seconds):
    return useful(train_size, samples_by_rank, epoch_seconds, statistics.fmean)


def with_the_warm_up(train_size, samples_by_rank, epoch_seconds):
    return min(train_size, sum(samples_by_rank)) / statistics.fmean(epoch_seconds)


def counts_samples_twice(train_size, samples_by_rank, epoch_seconds):
    return useful(sum(samples_by_rank), samples_by_rank, epoch_seconds)


ANSWERS = [
    Answers(
        check.fairness.synchronisations,
        [lambda messages: messages[-1] / 2 / (len(messages) - 1)],
        [
            lambda messages: messages[0] // (len(messages) - 1),
            lambda messages: messages[0] / len(messages) / 2,
        ],
    ),
    Answers(
        check.fairness.useful_rate,
        [useful],
        [counts_samples_twice, by_the_mean, with_the_warm_up],
    ),
    Answers(
        check.fairness.replicas_agree,
        [returns_a_tensor],
        [always_content, compares_sorted, only_rank_0_knows],
    ),
    Answers(
        check.fairness.interleaved_ratio,
        [the_right_ratio],
        [counts_the_warm_up, takes_the_lower],
    ),
]
