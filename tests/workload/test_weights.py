"""Parameters from a file: labkit's own, torchvision's, and what does not fit."""

import pickle
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from labkit.workload.models import build_model, import_torchvision, torchvision_layers
from labkit.workload.weights import load_weights, read_weights

MODELS = {
    "resnet18": "resnet18",
    "resnet50": "resnet50",
    "mobilenet": "mobilenet_v2",
    "inception_v3": "inception_v3",
    "vgg16": "vgg16",
}


def theirs(name, num_classes=10):
    """torchvision's state of a model on the meta device, with small numbers as its values."""
    make = getattr(import_torchvision().models, MODELS[name])
    options = {"init_weights": False} if name in ("inception_v3", "vgg16") else {}
    with torch.device("meta"):
        state = make(num_classes=num_classes, **options).state_dict()
    # One number each, which takes no memory; from 2 on, since BatchNorm starts with 0 and 1.
    return {
        key: torch.tensor(number, dtype=value.dtype).expand(value.shape)
        for number, (key, value) in enumerate(state.items(), start=2)
    }


def ours(name="resnet18", num_classes=10, pixels=75, channels=3, seed=0):
    shape = (channels, pixels, pixels)
    return build_model(name, num_classes=num_classes, input_shape=shape, seed=seed)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.pt"


@pytest.mark.parametrize("name", MODELS)
def test_torchvision_s_parameters_find_their_layers(name, path):
    """At full size ours computes what torchvision's does if both have the same values in order."""
    state = theirs(name)
    torch.save(state, path)
    model = ours(name)
    told = load_weights(model, path, name)
    mine = list(model.state_dict().items())
    parts = [(key, v) for key, v in state.items() if not key.startswith("AuxLogits")]
    if name == "vgg16":
        parts = [(key, value) for key, value in parts if key.startswith("features")]
        assert told == (
            "the last layer (33.weight [10, 512]) not in this shape in weights.pt: as initialised"
        )
        mine = mine[:-2]
    else:
        assert told == ""
    for (ours_key, value), (_, expected) in zip(mine, parts, strict=True):
        assert torch.equal(value, expected), ours_key


@pytest.mark.parametrize(
    ("shape", "num_classes", "words", "changed"),
    [
        ((3, 75), 7, r"the last layer \(14.weight \[7, 512\]\) not", 14),
        ((3, 32), 10, r"the first layer \(0.weight \[64, 3, 3, 3\]\) not", 0),
        ((1, 75), 10, r"the first layer \(0.weight \[64, 1, 7, 7\]\) not", 0),
    ],
)
def test_what_is_made_for_other_data_stays_as_initialised(
    path, shape, num_classes, words, changed
):
    torch.save(theirs("resnet18"), path)
    channels, pixels = shape
    model = ours(num_classes=num_classes, pixels=pixels, channels=channels)
    before = ours(num_classes=num_classes, pixels=pixels, channels=channels).state_dict()
    told = load_weights(model, path, "resnet18")
    assert re.match(words, told)
    same = {key for key, value in model.state_dict().items() if torch.equal(value, before[key])}
    assert {key.split(".")[0] for key in same} == {str(changed)}


def test_own_parameters_for_other_sizes_and_classes(path):
    small = ours(pixels=32, seed=1)
    save_file(small.state_dict(), path)
    same, large = ours(pixels=32), ours(num_classes=3)
    assert load_weights(same, path, "resnet18") == ""
    assert all(map(torch.equal, same.state_dict().values(), small.state_dict().values()))
    told = load_weights(large, path, "resnet18")
    assert told.startswith("the last layer (14.weight [3, 512]) and the first layer (0.weight")
    # Behind the pooling that small images do not have.
    assert torch.equal(large[5].conv1.weight, small[4].conv1.weight)


@pytest.mark.parametrize("wrap", ["model", "state_dict", "module."])
def test_checkpoints_of_other_scripts(path, wrap):
    model, other = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    state = model.state_dict()
    inside = {wrap: state, "epoch": 3}
    if wrap == "module.":
        inside = {wrap + key: value for key, value in state.items()}
    torch.save(inside, path)
    assert load_weights(other.double(), path) == ""
    assert torch.equal(other[0].weight, model[0].weight.double())


def test_own_models_take_their_own_names_alone(path):
    torch.save(nn.Sequential(nn.Linear(3, 2)).state_dict(), path)
    with pytest.raises(ValueError, match=r"0\.weight is \[2, 3\] in the file and \[4, 3\] in"):
        load_weights(nn.Sequential(nn.Linear(3, 4)), path)
    named = nn.Sequential()
    named.add_module("head", nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"head.weight \[2, 3\] is not in the file.*and 1 more"):
        load_weights(named, path)


@pytest.mark.parametrize("other", ["resnet50", "mobilenet", "vgg16"])
def test_another_model_is_refused(path, other):
    torch.save(theirs(other), path)
    before = ours(pixels=32).state_dict()
    model = ours(pixels=32)
    with pytest.raises(ValueError, match=r"does not fit the model resnet18: .*and \d+ more"):
        load_weights(model, path, "resnet18")
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_a_deeper_model_of_the_same_kind_is_refused(path):
    state = theirs("resnet18")
    state["layer1.2.conv1.weight"] = torch.ones(64, 64, 3, 3)
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"layer1\.2\.conv1\.weight .* is not in the model"):
        load_weights(ours(), path, "resnet18")


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
        with pytest.raises(ValueError, match=r"weights: .*weights\.pt cannot be read") as caught:
            read_weights(path)
        assert "\n" not in str(caught.value)
    for value in (Attack(), [torch.ones(1)], {"a": 1}, {}, {"model": nn.Linear(1, 1)}):
        torch.save(value, path)
        with pytest.raises(ValueError, match=r"weights: .*(cannot be read|holds a)"):
            read_weights(path)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="there is no file"):
        read_weights(tmp_path / "absent")
    with pytest.raises(ValueError, match="cannot be read: it is not a plain file"):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_the_names_of_the_layers_are_torchvision_s(name):
    layers = torchvision_layers(name)
    model = ours(name)
    assert len(layers) == sum(bool(layer.state_dict()) for layer in model)
    keys = theirs(name)
    assert all(any(key.startswith(f"{layer}.") for key in keys) for layer in layers if layer)
