"""How equal two runs have to be, by dtype and devices: one place says it."""

import math
from types import SimpleNamespace

import pytest
import torch

from labkit.config import RunConfig
from labkit.tracing import Trace
from labkit.training.result import TrainResult
from labkit.training.state import largest_difference


def trained(weight, devices=("cpu",), **settings):
    """A result with one weight, of ranks on these devices."""
    nothing = SimpleNamespace()
    return TrainResult(
        config=RunConfig(**settings),
        epochs=[],
        phases_s={},
        bytes_sent=None,
        messages=None,
        state={"weight": torch.tensor([weight], dtype=torch.float64)},
        checksums=[],
        trace=Trace(devices=dict(enumerate(devices))),
        hardware=nothing,
        versions=nothing,
    )


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
    assert not one.equals(far)


def test_a_stage_on_a_gpu_counts_although_the_rank_is_on_the_cpu():
    settings = {"strategy": "model_parallel", "split_points": "3"}
    for devices, is_equal in (("cpu,cuda:0", True), ("cpu,cpu", False)):
        result = trained(1 + 5e-5, **settings)
        object.__setattr__(result.config, "devices", devices)
        assert result.equals(trained(1.0)) == is_equal


def test_a_float32_run_is_not_held_to_float64():
    assert trained(1 + 5e-6, dtype="float32").equals(trained(1.0, dtype="float64"))
    assert not trained(float("nan")).equals(trained(1.0))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-16), (torch.float32, 1e-7)])
def test_a_tensor_that_is_zero_but_for_rounding_is_compared_as_it_is(dtype, rounding):
    """As a bias that starts at zero, and whose effect BatchNorm cancels."""

    def state(bias, steps=3):
        tensors = {
            "weight": torch.ones(2, dtype=dtype),
            "bias": torch.full((2,), bias, dtype=dtype),
        }
        return tensors | {"steps": torch.tensor(steps)}

    assert 0 < largest_difference(state(rounding), state(-rounding)) < 3 * rounding
    assert largest_difference(state(2e-3), state(1e-3)) == pytest.approx(1)
    assert largest_difference(state(1e-3), state(rounding)) > 1
    assert math.isnan(largest_difference(state(math.nan), state(rounding)))
    assert largest_difference(state(0.0, steps=4), state(0.0)) == pytest.approx(1 / 3)
