"""A model as a list of layers: which, and what crosses the cuts."""

import copy

import pytest
import torch
from torch import nn

from labkit.workload.chain import layers_of, named_layers
from labkit.workload.layers import output_shapes
from labkit.workload.meta import meta_copy
from labkit.workload.models import MODELS, build_model, published_vgg16


def test_nested_chains_are_opened_and_blocks_are_not():
    block = nn.ModuleList([nn.Linear(2, 2)])
    inner = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential(nn.Linear(2, 2), inner, block)
    assert [name for name, _ in named_layers(model)] == ["0", "1.0", "1.1.0", "2"]
    assert layers_of(model) == [model[0], inner[0], inner[1][0], block]


def test_a_model_that_is_not_a_chain_of_layers_is_refused_by_its_name():
    class Residual(nn.Sequential):
        def forward(self, inputs):
            return inputs + super().forward(inputs)

    for model in (nn.Linear(2, 2), Residual(nn.Linear(2, 2))):
        with pytest.raises(ValueError, match=f"{type(model).__name__} cannot be cut into layers"):
            layers_of(model)
    assert layers_of(nn.Sequential(residual := Residual(nn.Tanh()))) == [residual]
    with pytest.raises(ValueError, match="has no layers"):
        layers_of(nn.Sequential())


def test_hooks_of_a_chain_keep_it_whole_and_on_the_model_they_are_refused():
    inner = nn.Sequential(nn.Tanh(), nn.Tanh())
    model = nn.Sequential(nn.Linear(2, 2), inner)
    inner.register_full_backward_hook(lambda *_: None)
    assert layers_of(model) == [model[0], inner]
    model.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks on this Sequential would not run"):
        layers_of(model)


def test_shapes_need_no_hook_and_no_value():
    seen = []
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    model[1].register_forward_hook(lambda *_: seen.append(1))
    model[0].register_forward_pre_hook(lambda *_: seen.append(2))
    model[1].mask = torch.ones(3)
    assert output_shapes(model, (2,))[1][0] == (1, 3)
    assert seen == []
    assert meta_copy(model)[1].mask.is_meta
    model(torch.ones(1, 2))
    assert sorted(seen) == [1, 2]


@pytest.mark.parametrize("name", MODELS)
def test_shapes_on_paper_are_those_of_a_real_run(name):
    # Inception v3 takes no smaller images.
    image = (1, 75, 75) if name == "inception_v3" else (1, 8, 8)
    model = build_model(name, num_classes=10, input_shape=image, seed=0)
    before = copy.deepcopy(model.state_dict())
    found = output_shapes(model, image, batch_size=3)
    value = torch.randn(3, *image)
    for layer, (shape, dtype) in zip(layers_of(model), found, strict=True):
        value = layer(value)
        assert (value.shape, value.dtype) == (shape, dtype)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()
               if "running" not in key and "batches" not in key)  # fmt: skip


def test_the_floats_that_cross_the_cuts_of_the_published_vgg16_at_299_pixels():
    shapes = [shape for shape, _ in output_shapes(published_vgg16(), (3, 299, 299))]
    # features[:15] | features[15:31] | average and flattening | classifier
    assert [shapes[point - 1].numel() for point in (15, 31, 33)] == [1_401_856, 41_472, 25_088]
    assert shapes[-1] == (1, 10)
    assert sum(p.numel() for p in published_vgg16().parameters()) == 134_301_514


def test_a_layer_that_does_not_take_what_comes_is_named():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 5))
    with pytest.raises(ValueError, match=r"layer 1 \(Linear\) does not take \[2, 5\]"):
        output_shapes(model, (4,), 2)
    with pytest.raises(ValueError, match=r"layer 0 \(LSTM\) returns a tuple"):
        output_shapes(nn.Sequential(nn.LSTM(3, 3)), (2, 3))


def test_a_meta_copy_has_the_ties_of_its_model_and_no_memory():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    copied = meta_copy(model)
    assert copied[2].weight is copied[0].weight
    assert {tensor.device.type for tensor in copied.state_dict().values()} == {"meta"}
    assert isinstance(copied[0].weight, nn.Parameter)
    assert model[0].weight.device.type == "cpu"
