"""Images in folders: as torchvision reads them, and mistakes that are named."""

import numpy as np
import pytest
import torch
from PIL import Image

from labkit.workload.folders import is_folder, open_folder
from labkit.workload.random_numbers import seeded


def put(folder, name, count=2, size=(6, 5), color=0, kind="png"):
    (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.full((*size, 3), color + number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name / f"{number}.{kind}")


@pytest.fixture
def pets(tmp_path):
    for part in ("train", "val"):
        put(tmp_path / part, "cat", 3, color=10)
        put(tmp_path / part, "dog", 2, color=100)
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "train" / "notes.txt").touch()
    (tmp_path / "train" / "dog" / "notes.txt").touch()
    return tmp_path


def test_classes_and_images_are_those_of_torchvision(pets):
    from torchvision.datasets import ImageFolder

    (pets / "train" / ".ipynb_checkpoints").rmdir()
    train, val = open_folder(str(pets))
    theirs = ImageFolder(pets / "train")
    assert train.classes == theirs.classes == val.classes == ["cat", "dog"]
    for (image, number), (picture, expected) in zip(train, theirs, strict=True):
        assert number == expected
        assert torch.equal(image, torch.from_numpy(np.array(picture)).permute(2, 0, 1))


def test_hidden_folders_are_no_classes(pets):
    assert open_folder(str(pets))[0].classes == ["cat", "dog"]


def test_which_folder_is_held_out(pets):
    assert len(open_folder(str(pets))[1]) == 5
    put(pets / "test", "cat", 1)
    put(pets / "test", "dog", 1)
    assert len(open_folder(str(pets))[1]) == 5
    (pets / "val").rename(pets / "elsewhere")
    assert len(open_folder(str(pets))[1]) == 2
    train, nothing = open_folder(str(pets / "train"))
    assert (len(train), nothing) == (5, None)


def test_a_part_has_images_of_all_classes(pets):
    train, val = open_folder(str(pets), train_size=4)
    assert [number for _, number in train] == [0, 0, 0, 1]
    assert len(val) == 5


def test_images_are_scaled_and_cropped_at_random(pets):
    put(pets / "train", "dog", 2, size=(30, 50), color=100)
    train, val = open_folder(str(pets), resize=8, crop=True)
    with seeded(1):
        images = [image for image, _ in train]
    with seeded(1):
        assert all(torch.equal(a, b) for a, (b, _) in zip(images, train))
    assert {tuple(image.shape) for image in images} == {(3, 8, 8)}
    for part, draws in (("train", 5), ("val", 1)):
        wide = pets / part / "dog" / "0.png"
        Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3)).save(wide)
        images = train if part == "train" else val
        assert len({bytes(images[3][0].numpy()) for _ in range(5)}) == draws


def empty_class(pets):
    (pets / "train" / "eel").mkdir()
    return "train is no folder of images: .*eel"


def empty_class_held_out(pets):
    for path in (pets / "val" / "cat").iterdir():
        path.unlink()
    return "val is no folder of images: .*cat"


def other_class(pets):
    (pets / "val" / "dog").rename(pets / "val" / "eel")
    return r"val has other classes than .*\(dog, eel\)"


def damaged(pets):
    path = pets / "train" / "cat" / "0.png"
    path.write_bytes(path.read_bytes()[:40])
    return r"cat/0\.png cannot be read"


def no_image(pets):
    (pets / "train" / "cat" / "0.png").write_text("hello")
    return r"cat/0\.png cannot be read"


def no_train(pets):
    (pets / "train").rename(pets / "elsewhere")
    return "has val and no train"


def no_classes(pets):
    for name in ("cat", "dog"):
        for path in (pets / "train" / name).iterdir():
            path.rename(pets / "train" / f"{name}{path.name}")
        (pets / "train" / name).rmdir()
    return "train is no folder of images: "


MISTAKES = (empty_class, empty_class_held_out, other_class, damaged, no_image, no_train)


@pytest.mark.parametrize("make", [*MISTAKES, no_classes])
def test_mistakes_are_named(pets, make):
    words = make(pets)
    with pytest.raises(ValueError, match=words):
        [*open_folder(str(pets))[0]]


def test_too_many_and_no_such_folder(pets):
    with pytest.raises(ValueError, match=r"train_size 6: .*train has 5 training images"):
        open_folder(str(pets), train_size=6)
    with pytest.raises(ValueError, match=r"there is no folder .*absent.*digits"):
        open_folder(str(pets / "absent"))


def test_what_counts_as_a_folder(pets, monkeypatch):
    monkeypatch.chdir(pets)
    (pets / "digits").mkdir()
    found = {name: is_folder(name) for name in ("train", "digits", "./x", "x", "my:make", "a/b:c")}
    assert [name for name, is_one in found.items() if is_one] == ["train", "./x"]
