"""A model as a list of layers: which, what crosses the cuts, and what forward keeps."""

import copy

import pytest
import torch
from torch import nn

from labkit.workload.layers import EmulatedLayer, HeldBytes, layers_of, output_shapes
from labkit.workload.models import MODELS, TEXT_MODELS, build_model


# Which expert gets how much depends on values.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "moe_gpt"])
def test_shapes_on_paper_are_those_of_a_real_run(name):
    shape = (8,) if name in TEXT_MODELS else (1, 8, 8)
    model = build_model(name, num_classes=10, input_shape=shape, seed=0)
    before = copy.deepcopy(model.state_dict())
    found = output_shapes(model, shape, batch_size=3)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    value = torch.randint(10, (3, 8)) if name in TEXT_MODELS else torch.randn(3, 1, 8, 8)
    for layer, (shape, dtype) in zip(layers_of(model), found, strict=True):
        value = layer(value)
        assert (value.shape, value.dtype) == (shape, dtype)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_scripted_module_is_one_layer():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    assert len(layers_of(nn.Sequential(scripted, nn.Linear(4, 4)))) == 2
    with pytest.raises(ValueError, match="cannot be cut into layers"):
        layers_of(scripted)


def test_what_a_forward_keeps_for_its_backward_in_bytes():
    linear = nn.Linear(4, 4)
    inputs = torch.randn(3, 4)
    with HeldBytes(linear) as held:
        outputs = torch.tanh(linear(inputs))
    # The input and tanh's result; the weight is there anyway.
    assert held.num_bytes == 2 * 3 * 4 * 4
    with held:
        outputs.square().sum()  # keeps tanh's result, which counts already
    assert held.num_bytes == 2 * 3 * 4 * 4
    with HeldBytes(linear) as held:
        torch.tanh(inputs[:1].requires_grad_())
    assert held.num_bytes == 4 * 4


def test_each_half_of_an_emulated_backward_takes_as_long_as_the_forward(monkeypatch):
    slept_s = []
    monkeypatch.setattr("time.sleep", slept_s.append)
    layer, value = EmulatedLayer(0.5), torch.ones(2, 3, requires_grad=True)
    outputs = layer(value)
    ones = torch.ones_like(outputs)
    torch.autograd.grad(outputs, value, ones, retain_graph=True)
    torch.autograd.grad(outputs, layer.scale, ones, retain_graph=True)
    outputs.backward(ones)
    layer(value.detach()).backward(ones)
    assert slept_s == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
