"""Answers to ``check.failures``."""

import math

from graded import Answers

from workbook import check

# interval(checkpoint_s, gpu_s, num_gpus)


def interval(checkpoint_s, gpu_s, num_gpus):
    return math.sqrt(2 * checkpoint_s * gpu_s / num_gpus)


def least_of_many(checkpoint_s, gpu_s, num_gpus):
    """Where both losses are equal, by bisection."""
    low_s, high_s = 1e-6, 1e12
    for _ in range(200):
        middle_s = math.sqrt(low_s * high_s)
        if checkpoint_s / middle_s > middle_s * num_gpus / (2 * gpu_s):
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


def without_the_factor(checkpoint_s, gpu_s, num_gpus):
    return interval(checkpoint_s / 2, gpu_s, num_gpus)


def of_one_gpu(checkpoint_s, gpu_s, num_gpus):
    return interval(checkpoint_s, gpu_s, 1)


ANSWERS = [
    Answers(
        check.failures.interval,
        [interval, least_of_many],
        [without_the_factor, of_one_gpu],
    ),
]
