"""A model as a list of layers: which, what crosses the cuts, what they cost."""

import copy

import pytest
import torch
from torch import nn

from labkit.placement.even_split import even_split
from labkit.placement.profile import profile_layers
from labkit.workload.activations import HeldBytes
from labkit.workload.layers import layers_of, meta_copy, named_layers, output_shapes
from labkit.workload.models import MODELS, build_model, published_vgg16


def test_nested_chains_are_opened_and_blocks_are_not():
    block = nn.ModuleList([nn.Linear(2, 2)])
    inner = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential(nn.Linear(2, 2), inner, block)
    assert [name for name, _ in named_layers(model)] == ["0", "1.0", "1.1.0", "2"]
    assert layers_of(model) == [model[0], inner[0], inner[1][0], block]


def test_what_is_no_chain_of_layers_is_refused_by_its_name():
    class Residual(nn.Sequential):
        def forward(self, inputs):
            return inputs + super().forward(inputs)

    for model in (nn.Linear(2, 2), Residual(nn.Linear(2, 2))):
        with pytest.raises(ValueError, match=f"{type(model).__name__} is not an nn.Sequential"):
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
    model = build_model(name, num_classes=10, input_shape=(1, 8, 8), seed=0)
    before = copy.deepcopy(model.state_dict())
    found = output_shapes(model, (1, 8, 8), batch_size=3)
    value = torch.randn(3, 1, 8, 8)
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
    with pytest.raises(ValueError, match=r"layer 0 \(LSTM\) hands on a tuple"):
        output_shapes(nn.Sequential(nn.LSTM(3, 3)), (2, 3))


def test_a_ghost_has_the_ties_of_its_model_and_no_memory():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    ghost = meta_copy(model)
    assert ghost[2].weight is ghost[0].weight
    assert {tensor.device.type for tensor in ghost.state_dict().values()} == {"meta"}
    assert isinstance(ghost[0].weight, nn.Parameter)
    assert model[0].weight.device.type == "cpu"


def test_an_even_split_shares_the_products_out():
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
    assert even_split(nn.Sequential(*layers), (8,), 2) == (3,)
    assert even_split(nn.Sequential(*layers), (8,), 1) == ()
    with pytest.raises(ValueError, match="from 1 to 5, the layers of Sequential; got 6"):
        even_split(nn.Sequential(*layers), (8,), 6)


def test_models_that_take_whole_numbers_are_split_and_measured():
    words = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(18, 6), nn.Linear(6, 4))
    assert output_shapes(words, (3,), 2)[0] == ((2, 3, 6), torch.float32)
    assert even_split(words, (3,), 2) == (3,)
    found = profile_layers(words, 2, (3,), repeats=1)
    assert found.input_bytes == 2 * 3 * 8
    assert all(layer.backward_s > 0 for layer in (found.layers[0], found.layers[2]))
    # Where the first layer does not tell, the caller does.
    hidden = nn.Sequential(nn.Sequential(*words[:2]), nn.Identity(), *words[2:])
    hidden[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"layer 0 \(Sequential\) does not take \[1, 3\]"):
        even_split(hidden, (3,), 2)
    assert even_split(hidden, (3,), 2, torch.int32) == (3,)
    assert profile_layers(hidden, 2, (3,), repeats=1, dtype=torch.int32).input_bytes == 2 * 3 * 4


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


def test_a_profile_has_the_bytes_of_the_shapes_and_times_above_zero():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2))
    found = profile_layers(model, 6, (3, 4), repeats=2, name="tiny")
    assert (found.model, found.batch_size, found.input_bytes) == ("tiny", 6, 6 * 12 * 4)
    assert [layer.name for layer in found.layers] == ["Flatten", "Linear", "Tanh", "Linear"]
    assert [layer.output_bytes for layer in found.layers] == [6 * n * 4 for n in (12, 5, 5, 2)]
    assert [layer.parameter_bytes for layer in found.layers] == [0, 65 * 4, 0, 12 * 4]
    # The second Linear keeps what Tanh has kept already.
    assert [layer.held_bytes for layer in found.layers] == [0, 6 * 12 * 4, 6 * 5 * 4, 0]
    assert all(layer.forward_s > 0 for layer in found.layers)
    assert [layer.backward_s > 0 for layer in found.layers] == [False, True, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    in_place = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    assert profile_layers(in_place, 2, (4,), repeats=1).layers[1].backward_s > 0
    with pytest.raises(ValueError, match="0 repeats"):
        profile_layers(model, 6, (3, 4), repeats=0)
