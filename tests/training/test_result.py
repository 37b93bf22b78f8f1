"""How equal two runs have to be, by dtype and devices: one place says it."""

import math

import pytest
import torch

from labkit.training.result import largest_difference


def test_a_tensor_that_is_zero_but_for_rounding_is_compared_as_it_is():
    """As a bias that starts at zero, and whose effect BatchNorm cancels."""

    def state(bias, steps=3):
        tensors = {"weight": torch.ones(2), "bias": torch.full((2,), bias)}
        return tensors | {"steps": torch.tensor(steps)}

    assert 0 < largest_difference(state(1e-7), state(-1e-7)) < 3e-7
    assert largest_difference(state(2e-3), state(1e-3)) == pytest.approx(1)
    assert largest_difference(state(1e-3), state(1e-7)) > 1
    assert math.isnan(largest_difference(state(math.nan), state(1e-7)))
    assert largest_difference(state(0.0, steps=4), state(0.0)) == pytest.approx(1 / 3)
