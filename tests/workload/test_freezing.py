"""Frozen layers: which they are, and that their statistics stay."""

import copy

import pytest
import torch
from torch import nn

from labkit.workload.freezing import freeze, is_frozen


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Dropout()),
        *(nn.Linear(4, 2), nn.Identity()),
    )


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(3, 3)
        self.classifier = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("names", "trained", "evaluating"),
    [
        (["features"], {"4.weight", "4.bias"}, {"1", "3.1"}),
        (["0", "1"], {"3.0.weight", "3.0.bias", "4.weight", "4.bias"}, {"1"}),
        (["3"], {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"}, {"3.1"}),
        (["0.weight"], {"0.bias", "1.weight", "1.bias", "3.0.weight", "3.0.bias"}, set()),
    ],
)
def test_what_is_named_is_frozen_with_all_that_is_in_it(names, trained, evaluating):
    made = model()
    freeze(made, names)
    found = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert found - {"4.weight", "4.bias"} == trained - {"4.weight", "4.bias"}
    assert {name for name, module in made.named_modules() if is_frozen(module)} == evaluating


def test_a_part_called_features_is_meant_if_there_is_one():
    made = Named()
    freeze(made, ["features"])
    frozen = [name for name, parameter in made.named_parameters() if not parameter.requires_grad]
    assert frozen == ["features.weight", "features.bias"]


@pytest.mark.parametrize("how", [lambda m: m, copy.deepcopy])
def test_frozen_statistics_are_used_and_stay(how):
    made = model()
    made[1].running_mean += 1
    freeze(made, ["0", "1"])
    made = how(made)
    inputs = torch.randn(5, 3)
    before = {name: buffer.clone() for name, buffer in made.named_buffers()}
    first = made.train()[:2](inputs)
    expected = made.eval()[:2](inputs)
    made.train()(inputs)
    assert torch.equal(first, expected)
    changed = {name for name, buffer in made.named_buffers() if not buffer.equal(before[name])}
    assert {name.rpartition(".")[0] for name in changed} == {"3.1"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["feature"], "no layer 'feature'.*did you mean 'features'"),
        (["9"], "no layer '9': name some of its layers, such as features, 0, 1"),
        (["features", "4"], "features,4 leaves no parameter to train"),
    ],
)
def test_mistakes_are_named(names, words):
    with pytest.raises(ValueError, match=words):
        freeze(model(), names)


def test_a_model_of_one_layer_has_no_features():
    made = nn.Linear(3, 2)
    freeze(made, ["features"])
    assert made.weight.requires_grad
