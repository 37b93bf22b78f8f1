"""Parameters from a file: labkit's own, torchvision's, what does not fit; and frozen layers."""

import copy
import json
import os
import pickle

import pytest
import torch
import torchvision
from safetensors.torch import save_file
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
        assert note == "not in this shape in weights.pt, so as initialized: 33.weight, 33.bias"
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
        load_weights(nn.Linear(3, 4), path)


class Net(nn.Module):
    """Tied parameters, a part called module, buffers; calling it is of no interest here."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 3)
        self.module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.module[1].running_mean)


def prefixed(state, prefix):
    return {prefix + key: value.clone() for key, value in state.items()}


def write_layout(layout, state, folder):
    """Write ``state`` as other programs do; returns what is given to --weights."""
    path = folder / "weights.pt"
    loss = {"loss.weight": torch.ones(5)}
    cloned = prefixed(state, "")
    contents = {
        "as it is": state,
        "DistributedDataParallel": prefixed(state, "module."),
        "torch.compile": prefixed(state, "_orig_mod."),
        "compiled parts": {
            key.replace("module.", "module._orig_mod."): v for key, v in state.items()
        },
        "nested": {"epoch": 3, "state_dict": prefixed(state, "module."), "optimizer": {"a": 1}},
        "nested twice": {"step": 3, "model": {"state_dict": dict(state)}},
        "a trainer's module": {"state_dict": prefixed(state, "model.") | loss},
        "tied once": {key: value for key, value in state.items() if key != "head.weight"},
        "old BatchNorm": {key: v for key, v in state.items() if "batches_tracked" not in key},
    }
    if layout in contents:
        torch.save(contents[layout], path)
    elif layout == "safetensors":
        path = folder / "weights.safetensors"
        save_file(cloned, path)
    elif layout == "shards with an index":
        path = folder
        weight_map = {key: f"model-{number % 2}.safetensors" for number, key in enumerate(cloned)}
        for shard in set(weight_map.values()):
            save_file({k: v for k, v in cloned.items() if weight_map[k] == shard}, path / shard)
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    elif layout == "labkit's checkpoint":
        path = folder
        save_file(
            prefixed(state, "model/") | {"random/cpu": torch.ones(1)}, path / "rank0.safetensors"
        )
    return path


LAYOUTS = (
    *("as it is", "DistributedDataParallel", "torch.compile", "compiled parts", "nested"),
    *("nested twice", "a trainer's module", "tied once", "old BatchNorm", "safetensors"),
    *("shards with an index", "labkit's checkpoint"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_that_people_have(layout, tmp_path):
    model, other = Net(0), Net(1)
    state = model.state_dict()
    note = load_weights(other, write_layout(layout, state, tmp_path), None)
    found, expected = counted(other.state_dict()), counted(state)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert other.head.weight is other.embed.weight
    assert ("loss.weight" in note) == (layout == "a trainer's module")


def test_half_precision_is_widened(path):
    model = Net(0)
    torch.save(model.half().state_dict(), path)
    assert load_weights(other := Net(1), path) == ""
    assert torch.equal(other.embed.weight, model.embed.weight.float())


def test_layouts_that_cannot_be_told_are_refused(tmp_path):
    state = Net(0).state_dict()
    contents = {
        "under 'ema.' and 'model.'": prefixed(state, "model.") | prefixed(state, "ema."),
        "2 state dicts, state_dict and model": {"model": dict(state), "state_dict": dict(state)},
        "holds one object of type list": [torch.ones(1)],
        "holds lr, epoch, and not tensors": {"lr": 0.1, "epoch": 3},
        r"does not fit .*extra": state | {"extra": torch.ones(1)},
    }
    for match, content in contents.items():
        torch.save(content, tmp_path / "weights.pt")
        with pytest.raises(ValueError, match=match):
            load_weights(Net(1), tmp_path / "weights.pt")
    index = tmp_path / "model.safetensors.index.json"
    for match, text in {
        "is not an index of shards": "[]",
        "other folders": '{"weight_map": {"a": "../weights.pt"}}',
        "there is no file": '{"weight_map": {"a": "model-1.safetensors"}}',
    }.items():
        index.write_text(text)
        with pytest.raises(ValueError, match=match):
            read_weights(tmp_path)
    index.unlink()
    with pytest.raises(ValueError, match=r"holds weights\.pt, and not one index"):
        read_weights(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ValueError, match=r"distributed checkpoint of PyTorch's.*dcp_to_torch"):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_names_in_another_order_are_torchvision_s_all_the_same(name, tmp_path):
    """safetensors sorts them, and numbers the layers "10" before "2"."""
    state = {key: value.clone() for key, value in theirs(name).items()}
    if name == "vgg16":
        state = {key: value for key, value in state.items() if key.startswith("features")}
    save_file(state, tmp_path / "weights.safetensors")
    model = ours(name)
    load_weights(model, tmp_path / "weights.safetensors", name)
    values = list(model.state_dict().values())[: len(state)]
    assert all(map(torch.equal, values, state.values()))


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
        with pytest.raises(ValueError, match=r"weights: .*(cannot be read|and not tensors)"):
            read_weights(path)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="there is no file"):
        read_weights(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="it is not a regular file"):
        read_weights(tmp_path / "pipe")


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
