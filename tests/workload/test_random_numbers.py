"""Random numbers of a sample: those of splitmix64, and the same whatever was drawn before."""

import random

import numpy as np
import pytest
import torch

from labkit.workload.random_numbers import SeededReader, draw, sample_keys, seeded

GOLDEN = 0x9E3779B97F4A7C15


def mixed(value):
    """The output function of splitmix64, in Python's integers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


@pytest.mark.parametrize(
    ("seed", "epoch", "number"), [(0, 0, 0), (5, 3, 7), (2**32 - 1, -1, 10**6)]
)
def test_the_numbers_are_those_of_the_published_generator(seed, epoch, number):
    of_epoch = mixed((mixed(seed * GOLDEN % 2**64) + (epoch + 1) * GOLDEN) % 2**64)
    key = mixed((of_epoch + (number + 1) * GOLDEN) % 2**64)
    keys = sample_keys(seed, epoch, torch.tensor([0, number]))
    assert int(keys[1]) == key
    assert draw(keys, 2, 9)[1].item() == (mixed((key + 3 * GOLDEN) % 2**64) >> 32) % 9


def test_all_values_are_equally_frequent_and_nothing_repeats():
    keys = sample_keys(0, 0, torch.arange(90_000))
    assert len(np.unique(keys)) == 90_000
    counts = draw(keys, 0, 9).bincount()
    assert len(counts) == 9
    # Six standard deviations of a binomial distribution.
    assert (counts - 10_000).abs().max() < 600
    both = draw(keys, 0, 3) * 3 + draw(keys, 1, 3)
    assert (both.bincount() - 10_000).abs().max() < 600
    for other in (
        sample_keys(0, 1, torch.arange(90_000)),
        sample_keys(1, 0, torch.arange(90_000)),
    ):
        assert not np.isin(other, keys).any()


def all_three():
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_the_states_of_all_generators_come_back():
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(7)
    expected = [all_three() for _ in range(2)]
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(7)
    assert all_three() == expected[0]
    with seeded(3):
        inside = all_three()
    SeededReader(lambda numbers: [all_three() for _ in numbers])([1, 2], lambda: [5, 6])
    with pytest.raises(ZeroDivisionError), seeded(3):
        all_three()[0] / 0
    with seeded(3):
        assert all_three() == inside
    assert all_three() == expected[1]


@pytest.mark.parametrize("which", range(3))
def test_a_sample_has_the_same_numbers_in_any_company(which):
    def read(numbers):
        return [(number, all_three()[which]) for number in numbers]

    together = SeededReader(read)([4, 9, 4], lambda: [40, 90, 40])
    assert together[0] == together[2] != together[1]
    again = SeededReader(read)
    for _ in range(2):
        assert again([9], lambda: [90]) == together[1:2]
        assert again([9], lambda: [91]) != together[1:2]


def test_what_draws_nothing_is_read_at_once_and_once():
    calls = []

    def read(numbers):
        calls.append(list(numbers))
        return list(numbers)

    reader = SeededReader(read)
    assert reader([3, 1], lambda: [1, 2]) == reader([3, 1], lambda: [1, 2]) == [3, 1]
    assert calls == [[3, 1], [3, 1]]


def test_what_draws_is_read_twice_only_once():
    calls = []

    def read(numbers):
        calls.append(list(numbers))
        # Not for the first sample.
        return [np.random.rand() if number else 0.0 for number in numbers]

    reader = SeededReader(read)
    reader([0], lambda: [5])
    first = reader([0, 2], lambda: [5, 6])
    assert reader([0, 2], lambda: [5, 6]) == first
    assert calls == [[0], [0, 2], [0], [2], [0], [2]]
