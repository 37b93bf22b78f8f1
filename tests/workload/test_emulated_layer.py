"""An emulated layer: takes its time asleep, forward and twice as long backward, and trains."""

import time
from unittest import mock

import pytest
import torch
from torch import nn

from labkit.training.measured import measure_split
from labkit.workload.emulated_layer import EmulatedLayer
from labkit.workload.layers import output_shapes


@pytest.fixture
def slept():
    """The seconds of each sleep, none of which takes place."""
    with mock.patch.object(time, "sleep") as sleep:
        yield lambda: [call.args[0] for call in sleep.call_args_list]


def test_a_forward_takes_its_seconds_and_a_backward_twice_as_many(slept):
    layer = EmulatedLayer(sample_s=0.5, call_s=2.0)
    layer(torch.ones(4, 3)).sum().backward()
    assert slept() == [4.0, 8.0]


def test_it_trains_and_passes_its_gradient_on(slept):
    layer = EmulatedLayer(sample_s=1.0)
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    layer(value).sum().backward()
    assert layer.scale.grad == 10
    assert torch.equal(value.grad, torch.ones(2, 2))


def test_shapes_are_known_without_waiting(slept):
    model = nn.Sequential(EmulatedLayer(9.0), EmulatedLayer(9.0))
    assert [shape for shape, _ in output_shapes(model, (3,), 5)] == [torch.Size([5, 3])] * 2
    assert sum(slept()) == 0


def test_its_settings_are_shown():
    assert repr(EmulatedLayer(0.25, 2.0)) == "EmulatedLayer(sample_s=0.25, call_s=2.0)"


@pytest.mark.slow
def test_it_is_a_stage_like_any_other():
    model = nn.Sequential(*(EmulatedLayer(1e-4) for _ in range(3)))
    options = {"input_shape": (4,), "batch_size": 4, "steps": 1, "device": "cpu"}
    split = measure_split(model, (1, 2), micro_batches=2, **options)
    assert split.hop_bytes == [64, 64]
    assert all(seconds >= 4e-4 for seconds in split.forward_s)
    assert all(seconds >= 8e-4 for seconds in split.backward_s)
