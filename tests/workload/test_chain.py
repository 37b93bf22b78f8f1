"""Models whose own forward is a chain: where they are cut, and that the pieces are the model."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from labkit.workload.chain import layers_of, named_layers, state_key
from labkit.workload.models import import_torchvision


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs):
        return torch.relu(inputs + self.inner(inputs))


class Net(nn.Module):
    """A nested chain, blocks, functions, a skip connection, a parameter and a constant."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), Block()))
        self.block, self.skipped = Block(), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.full((4,), 2.0))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs, scale=None):
        value = self.block(self.body(inputs))
        value = value + functional.gelu(self.skipped(value)) * self.gain * torch.tensor(0.5)
        if scale is not None:
            value = value * scale
        return self.head(value.view(value.size(0), -1))


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, inputs):
        return self.net(inputs)


EXPECTED = ["body.0", "body.1.0", "body.1.1", "block", "", "", "head"]


def value_of(layers, inputs):
    for layer in layers:
        inputs = layer(inputs)
    return inputs


def test_a_forward_is_cut_where_one_tensor_crosses():
    model = Net()
    found = named_layers(model)
    assert [name for name, _ in found] == EXPECTED
    assert [type(layer).__name__ for _, layer in found[-4:]] == [
        "Block", "skipped..add", "size..view", "Linear"
    ]  # fmt: skip
    assert found[0][1] is model.body[0]
    inputs = torch.randn(5, 4)
    for mode in (True, False):
        model.train(mode)
        assert torch.equal(value_of(layers_of(model), inputs), model(inputs))
    names = [state_key(name, key) for name, layer in found for key in layer.state_dict()]
    assert set(model.state_dict()) <= set(names)
    assert not [name for name in vars(model) if "constant" in name], "tracing leaves no trace"


def test_the_layers_are_the_model_s_own():
    model = Net()
    with torch.no_grad():
        for layer in layers_of(model):
            for parameter in layer.parameters():
                parameter.zero_()
    assert not any(parameter.any() for parameter in model.parameters())


def test_a_model_in_a_model_is_opened_if_its_parts_are_called_one_by_one():
    opened = [state_key("net", name) for name in EXPECTED]
    assert [name for name, _ in named_layers(Wrapper())] == opened
    chain = [name for name, _ in named_layers(nn.Sequential(Wrapper(), nn.Tanh()))]
    assert chain == ["0", "1"], "in an nn.Sequential every layer stays whole"


@pytest.mark.parametrize(
    ("name", "count", "first", "last"),
    [
        ("vgg16", 40, "features.0", "classifier.6"),
        ("resnet18", 15, "conv1", "fc"),
        ("densenet121", 25, "features.conv0", "classifier"),
        ("mobilenet_v2", 27, "features.0.0", "classifier.1"),
    ],
)
def test_torchvision_s_models_as_they_come(name, count, first, last):
    with torch.device("meta"):
        model = getattr(import_torchvision().models, name)(num_classes=10)
    found = named_layers(model)
    assert (len(found), found[0][0], found[-1][0]) == (count, first, last)
    names = {state_key(name, key) for name, layer in found for key in layer.state_dict()}
    assert names == set(model.state_dict())


class TwoInputs(nn.Module):
    def forward(self, left, right):
        return left + right


class TwoOutputs(nn.Module):
    def forward(self, inputs):
        return inputs, torch.tanh(inputs)


class LooksAtValues(nn.Module):
    def forward(self, inputs):
        return inputs if inputs.sum() > 0 else -inputs


class KnowsItsMode(nn.Module):
    def forward(self, inputs):
        return functional.dropout(torch.tanh(inputs), training=self.training)


class Tuples(nn.Module):
    """The only value between its two parts is a tuple."""

    def __init__(self):
        super().__init__()
        self.memory, self.head = nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, inputs):
        return self.memory(inputs)[0]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (TwoInputs(), "its forward takes left and right, not one tensor"),
        (TwoOutputs(), "does not return one tensor"),
        (LooksAtValues(), "torch.fx cannot trace its forward"),
        (KnowsItsMode(), "differs between training and evaluation"),
        (Tuples(), "no single tensor crosses"),
    ],
)
def test_a_forward_that_is_no_chain_is_refused_with_the_reason_and_the_way_out(model, reason):
    with pytest.raises(ValueError, match=f"{reason}.*Give the model as a list of layers"):
        layers_of(model)
