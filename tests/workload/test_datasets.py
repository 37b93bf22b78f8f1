"""Data that are what they say, and errors that help."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from labkit.workload.datasets import load_dataset, open_folder


def test_digits_are_what_the_readme_says():
    data = load_dataset("digits")
    assert (data.name, data.num_classes, data.input_shape) == ("digits", 10, (1, 8, 8))
    assert data.train_inputs.shape == (1437, 1, 8, 8)
    assert data.test_inputs.shape == (360, 1, 8, 8)
    assert data.train_inputs.dtype == torch.float32
    assert data.train_targets.dtype == data.test_targets.dtype == torch.int64
    assert data.test_targets.bincount().tolist() == [36] * 10
    assert abs(data.train_inputs.mean().item()) < 1e-3
    assert abs(data.train_inputs.std().item() - 1) < 1e-3
    assert len(data.train_inputs.unique()) == 17
    train = {tuple(image.flatten().tolist()) for image in data.train_inputs}
    assert not train & {tuple(image.flatten().tolist()) for image in data.test_inputs}


def put(folder, name, count=2, size=(6, 5), color=0):
    (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.full((*size, 3), color + number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.fixture
def pets(tmp_path):
    for part in ("train", "val"):
        put(tmp_path / part, "cat", 3, color=10)
        put(tmp_path / part, "dog", 2, color=100)
    return tmp_path


def test_images_in_folders_are_those_of_torchvision(pets):
    from torchvision.datasets import ImageFolder

    train, val = open_folder(str(pets))
    theirs = ImageFolder(pets / "train")
    assert train.classes == theirs.classes == val.classes == ["cat", "dog"]
    for (image, number), (picture, expected) in zip(train, theirs, strict=True):
        assert number == expected
        assert torch.equal(image, torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    # A part has images of all classes.
    assert [number for _, number in open_folder(str(pets), train_size=4)[0]] == [0, 0, 0, 1]
    (pets / "val").rename(pets / "elsewhere")
    assert open_folder(str(pets))[1] is None


def test_hidden_folders_and_files_are_no_classes_and_no_images(pets):
    expected = [number for _, number in open_folder(str(pets))[0]]
    image = next((pets / "train" / "cat").iterdir())
    for name in (".ipynb_checkpoints/copy.png", "cat/.ipynb_checkpoints/copy.png", "cat/._a.png"):
        hidden = pets / "train" / name
        hidden.parent.mkdir(exist_ok=True)
        shutil.copy(image, hidden)
    train, _ = open_folder(str(pets))
    assert train.classes == ["cat", "dog"]
    assert [number for _, number in train] == expected


def test_a_text_is_cut_into_samples_whose_targets_are_the_next_characters():
    data = load_dataset("text")
    assert (data.num_classes, data.input_shape) == (80, (64,))
    for inputs, targets in (
        (data.train_inputs, data.train_targets),
        (data.test_inputs, data.test_targets),
    ):
        assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    assert torch.equal(data.test_inputs[0, 0], data.train_targets[-1, -1])
    assert len(data.test_inputs) * 9 <= len(data.train_inputs) + 9
