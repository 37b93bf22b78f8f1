"""Random numbers of a sample are the same whatever was drawn before."""

import random

import numpy as np
import pytest
import torch

from labkit.workload.random_numbers import sample_seed, seedable, seeded


def test_a_sample_has_another_seed_in_each_run_and_epoch():
    runs = [(5, 3), (5, 4), (5, None), (6, 3), (3, 5)]
    found = {sample_seed(*run, number) for run in runs for number in range(9)}
    assert len(found) == 5 * 9
    assert sample_seed(5, 3, 7) == sample_seed(5, 3, 7)


def all_three():
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_the_states_of_all_generators_come_back():
    def begin():
        for generator in (torch.manual_seed, random.seed, np.random.seed):
            generator(7)

    begin()
    expected = [all_three() for _ in range(2)]
    begin()
    assert all_three() == expected[0]
    with seedable() as seed_all:
        seed_all(3)
        inside = all_three()
    with pytest.raises(ZeroDivisionError), seeded(3):
        all_three()[0] / 0
    with seeded(3):
        assert all_three() == inside
    assert all_three() == expected[1]
