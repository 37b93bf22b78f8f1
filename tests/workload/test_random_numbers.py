"""Random numbers of a sample are the same whatever was drawn before."""

import random

import numpy as np
import pytest
import torch

from labkit.workload.random_numbers import SeededReader, sample_seeds, seeded, uniform


def test_a_sample_draws_the_same_in_any_company_and_another_in_each_epoch():
    found = uniform(sample_seeds(5, 3, torch.tensor([7, 2, 7])), 4)
    assert torch.equal(found[:1], uniform(sample_seeds(5, 3, torch.tensor([7])), 4))
    assert torch.equal(found[0], found[2])
    others = [sample_seeds(*run, torch.arange(9)) for run in ((5, 3), (5, 4), (6, 3), (3, 5))]
    assert len({seed for seeds in others for seed in seeds}) == 4 * 9
    assert uniform([], 4).shape == (0, 4)


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
