"""Parameters as one flat tensor: views both ways, in the model and in its gradients."""

import pytest
import torch
from torch import nn

from labkit.strategies.flat_parameters import lay_end_to_end


def test_model_and_flat_tensor_are_one_memory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1].weight.requires_grad_(False)
    model.register_module("tied", model[2])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    values, gradients = lay_end_to_end(model)
    assert values.shape == gradients.shape == (3 * 2 + 2 + 2 * 2 + 2,)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    inputs = torch.randn(5, 3)
    for _ in range(2):
        model[:3](inputs).square().sum().backward()
    assert torch.equal(gradients[:6].view(2, 3), model[0].weight.grad)
    torch.testing.assert_close(gradients[:6].view(2, 3), 2 * half_the_gradient(model, inputs))
    values -= 1
    assert torch.equal(model[0].weight, before["0.weight"] - 1)
    assert torch.equal(model[1].weight, before["1.weight"])


def half_the_gradient(model, inputs):
    return torch.autograd.grad(model[:3](inputs).square().sum(), model[0].weight)[0]


def test_a_model_that_is_all_frozen_is_refused():
    with pytest.raises(ValueError, match="there is nothing to train"):
        lay_end_to_end(nn.Linear(2, 2).requires_grad_(False))
