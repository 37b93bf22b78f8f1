"""Answers to ``check.fairness``."""

import statistics

import torch
from graded import Answers
from ranks import travel_by_value

from labkit.collectives import ring_all_reduce
from workbook import check

travel_by_value(__name__)


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


def no_call(a, b, repeats):
    return 1.5


def from_pairs(rule):
    def ratio(a, b, repeats):
        return rule(*zip(*in_turns(a, b, repeats)[1:]))

    return ratio


# synchronisations(messages)


def of_rank_0(messages):
    return messages[0] // (2 * (len(messages) - 1))


# useful_rate(train_size, samples_by_rank, epoch_seconds)


def useful(train_size, samples_by_rank, epoch_seconds):
    return min(train_size, sum(samples_by_rank)) / statistics.median(epoch_seconds[1:])


def later_median(epoch_seconds):
    return statistics.median(epoch_seconds[1:])


ANSWERS = [
    Answers(
        check.fairness.synchronisations,
        [of_rank_0],
        [
            lambda messages: messages[0] // (len(messages) - 1),
            lambda messages: messages[0] / len(messages) / 2,
            lambda messages: 32,
        ],
    ),
    Answers(
        check.fairness.useful_rate,
        [useful],
        [
            lambda size, by_rank, s: sum(by_rank) / later_median(s),
            lambda size, by_rank, s: min(size, sum(by_rank)) / statistics.fmean(s[1:]),
            lambda size, by_rank, s: None,
        ],
    ),
    Answers(
        check.fairness.replicas_agree,
        [returns_a_tensor],
        [always_content, compares_sorted, only_rank_0_knows],
    ),
    Answers(
        check.fairness.interleaved_ratio,
        [the_right_ratio],
        [
            no_call,
            from_pairs(lambda a, b: statistics.median_low(y / x for x, y in zip(a, b))),
            lambda a, b, n: statistics.median(y / x for x, y in in_turns(a, b, n)),
        ],
    ),
]
