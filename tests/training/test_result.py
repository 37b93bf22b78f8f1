"""How equal two runs have to be, by dtype and devices: one place says it."""

import math
from types import SimpleNamespace

import pytest
import torch

from labkit.config import RunConfig
from labkit.tracing import Trace
from labkit.training.result import TrainResult, largest_difference


def trained(weight, devices=("cpu",), **settings):
    """A result with one weight, of ranks on these devices."""
    state = {"weight": torch.tensor([weight], dtype=torch.float64)}
    trace, nothing = Trace(devices=dict(enumerate(devices))), SimpleNamespace()
    config = RunConfig(**settings)
    return TrainResult(config, [], {}, None, None, state, [], trace, nothing, nothing)


@pytest.mark.parametrize(
    ("most", "dtype", "devices"),
    [
        (1e-10, "float64", ("cuda:0", "cuda:1")),
        (1e-5, "float32", ("cpu", "cpu")),
        (1e-4, "float32", ("cpu", "cuda:1")),
    ],
)
def test_runs_are_equal_up_to_the_rounding_of_their_dtype_and_devices(most, dtype, devices):
    one = trained(1.0, dtype=dtype)
    near, far = (trained(1 + times * most, devices, dtype=dtype) for times in (0.9, 1.1))
    assert near.equals(one)
    assert not far.equals(one)
    assert not trained(float("nan")).equals(one)


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
