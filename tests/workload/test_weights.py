"""Parameters from a file: labkit's own, torchvision's, what does not fit; and frozen layers."""

import copy
import pickle

import pytest
import torch
import torchvision
from torch import nn

from labkit.workload.models import build_model
from labkit.workload.weights import freeze, load_weights, read_weights

MODELS = {"resnet18": "resnet18", "mobilenet": "mobilenet_v2", "vgg16": "vgg16"}


def theirs(name):
    """torchvision's state of a model on the meta device, with small numbers as its values."""
    options = {"init_weights": False} if name == "vgg16" else {}
    with torch.device("meta"):
        model = getattr(torchvision.models, MODELS[name])(num_classes=10, **options)
    # One number each, which takes no memory; from 2 on, since BatchNorm starts with 0 and 1.
    return {
        key: torch.tensor(number, dtype=value.dtype).expand(value.shape)
        for number, (key, value) in enumerate(model.state_dict().items(), start=2)
    }


def ours(name="resnet18", num_classes=10, pixels=75, channels=3, seed=0):
    shape = (channels, pixels, pixels)
    return build_model(name, num_classes=num_classes, input_shape=shape, seed=seed)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.pt"


def counted(state):
    return {key: value for key, value in state.items() if "batches_tracked" not in key}


@pytest.mark.parametrize("old", [False, True], ids=["", "before 2018"])
@pytest.mark.parametrize("name", MODELS)
def test_torchvision_s_parameters_find_their_layers(name, old, path):
    """At full size ours computes what torchvision's does if both have the same values in order."""
    state = theirs(name)
    torch.save(counted(state) if old else state, path)
    model = ours(name)
    note = load_weights(model, path, name)
    mine, expected = list(counted(model.state_dict()).values()), counted(state)
    if name == "vgg16":
        assert note == "not in this shape in weights.pt, so as initialised: 33.weight, 33.bias"
        mine = mine[:-2]
        expected = {key: value for key, value in expected.items() if key.startswith("features")}
    else:
        assert note == ""
    assert all(map(torch.equal, mine, expected.values()))
    assert len(mine) == len(expected)


def test_own_models_take_their_own_names_alone(path):
    model, other = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, path)
    assert load_weights(other.double(), path) == ""
    assert torch.equal(other[0].weight, model[0].weight.double())
    with pytest.raises(ValueError, match=r"does not fit the model Sequential.*0\.weight"):
        load_weights(nn.Sequential(nn.Linear(3, 4)), path)
    with pytest.raises(ValueError, match=r"does not fit the model Linear.*weight"):
        load_weights(nn.Linear(3, 2), path)


class Attack:
    def __reduce__(self):
        return print, ("run",)


def test_damaged_and_foreign_files_are_refused(path, tmp_path, capsys):
    torch.save({"a": torch.ones(9)}, path)
    whole = path.read_bytes()
    contents = [b"", b"x", b"hello, world", whole[:-30], whole[: len(whole) // 2], b"\x80\x04N."]
    contents += [pickle.dumps(Attack()), (8).to_bytes(8, "little") + b'{"a": 1}']
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"weights: .*weights\.pt cannot be read"):
            read_weights(path)
    for value in (Attack(), [torch.ones(1)], {"a": 1}, {"model": nn.Linear(1, 1)}):
        torch.save(value, path)
        with pytest.raises(ValueError, match=r"weights: .*(cannot be read|holds other)"):
            read_weights(path)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="there is no file"):
        read_weights(tmp_path / "absent")
    with pytest.raises(ValueError, match="it is not a regular file"):
        read_weights(tmp_path)


def layered():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Dropout()),
        *(nn.Linear(4, 2), nn.Identity()),
    )


@pytest.mark.parametrize(
    ("names", "trained", "changed"),
    [
        (["features"], {"4"}, set()),
        (["0", "1"], {"3.0", "4"}, {"3.1"}),
        (["1", "4.bias"], {"0", "3.0", "4"}, {"3.1"}),
    ],
)
def test_what_is_named_is_frozen_with_all_that_is_in_it(names, trained, changed):
    made = layered()
    freeze(made, names)
    made = copy.deepcopy(made).train()
    found = {name.rpartition(".")[0] for name, p in made.named_parameters() if p.requires_grad}
    assert found == trained
    before = {name: buffer.clone() for name, buffer in made.named_buffers()}
    made(torch.randn(5, 3))
    other = {name for name, buffer in made.named_buffers() if not buffer.equal(before[name])}
    assert {name.rpartition(".")[0] for name in other} == changed
