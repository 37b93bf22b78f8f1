"""Data sets: digits, a text, torchvision's, and a learner's images in folders."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from labkit.engine.files import check_regular, user_folder
from labkit.extras import require
from labkit.units import check_choice
from labkit.workload.samples import Standard, Transform

# README.md in it says where its files come from, and under which license.
PACKAGE_DATA = Path(__file__).resolve().parent / "data"
# A sample of text is this many characters, and its targets are those that follow each of them.
TEXT_LENGTH = 64

# Images [N, C, H, W] uint8 and targets [N] of the training or the held-out part.
_Part = tuple[Tensor, Tensor]

# data/make_digits.py in the clone wrote them.
_DIGITS_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_RESTORE = "restore it with `git checkout -- labkit/workload/data/{}`, or install labkit again"
# torchvision's class, and the folder that the class uses in its root.
_TORCHVISION = {"cifar10": ("CIFAR10", "cifar-10-batches-py"), "mnist": ("MNIST", "MNIST")}
DATASETS = ("digits", *_TORCHVISION, "text")
_DIGITS = Standard(16, (0.3054,), (0.3761,))
_STANDARDS = {
    "mnist": Standard(255, (0.1307,), (0.3081,)),
    "cifar10": Standard(255, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
# Of ImageNet's training images, as torchvision's models take them.
IMAGENET = Standard(255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, eq=False)
class Data:
    """A data set in memory, on the CPU.

    Attributes:
        train_inputs, test_inputs: [N, C, H, W]; each channel has mean 0 and deviation 1. Of a
            text, [N, T] int64: the number of each character.
        train_targets, test_targets: [N] int64, of a text [N, T]; 0 .. num_classes - 1.
        standard: None, or the inputs are uint8 still, and this turns them into such values.
    """

    name: str
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    num_classes: int = 10
    standard: Standard | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of one sample, or (T,)."""
        return tuple(self.train_inputs.shape[1:])


def load_dataset(
    name: str,
    *,
    root: str | Path | None = None,
    download: bool = False,
    train_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    stored: bool = False,
) -> Data:
    """Load data set ``name``, one of ``DATASETS``.

    Args:
        root: the folder to look in. By default labkit's own for digits and text; for
            torchvision's sets that in the environment variable LABKIT_DATA, or labkit/datasets
            in XDG_DATA_HOME or ~/.local/share.
        download: fetch a set that is missing. Of several processes, let one download it first.
        train_size: keep only the first ``train_size`` training samples; None keeps all.
        stored: leave images as the bytes that they are stored in, not as ``dtype``.

    ValueError for a damaged file or a failed download, FileNotFoundError for missing data.
    """
    check_choice("data set", name, DATASETS)
    classes = 10
    if name == "text":
        train, test, classes = _read_text(Path(root or PACKAGE_DATA / "text"))
    elif name in _TORCHVISION:
        root = root or os.environ.get("LABKIT_DATA") or user_folder() / "datasets"
        train, test = _read_torchvision(name, Path(root), download)
    else:
        train, test = _read_digits(Path(root or PACKAGE_DATA / "digits"))
    inputs, targets = train
    num_train = len(targets)
    if train_size is not None and not 1 <= train_size <= num_train:
        raise ValueError(f"train_size {train_size}: {name} has {num_train} training samples")
    inputs = inputs[:train_size]
    targets = targets[:train_size]
    test_inputs, test_targets = test
    standard = None if name == "text" else _STANDARDS.get(name, _DIGITS)
    if not stored:
        transform = Transform(standard)
        inputs = transform(inputs, dtype)
        test_inputs = transform(test_inputs, dtype)
        standard = None
    return Data(name, inputs, targets, test_inputs, test_targets, classes, standard)


def _read_text(folder: Path) -> tuple[_Part, _Part, int]:
    """The text's first nine tenths, the rest, and the number of different characters."""
    path = folder / "moby-dick.txt"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {_RESTORE.format('text')}")
    text = path.read_text(encoding="utf-8")
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    count = (len(text) - 1) // TEXT_LENGTH
    codes = torch.tensor([number[character] for character in text[: count * TEXT_LENGTH + 1]])
    inputs = codes[:-1].view(count, -1)
    targets = codes[1:].view(count, -1)
    end = count * 9 // 10
    return (inputs[:end], targets[:end]), (inputs[end:], targets[end:]), len(number)


def _read_digits(folder: Path) -> tuple[_Part, _Part]:
    restore = _RESTORE.format("digits")
    parts = []
    for name in _DIGITS_FILES:
        path = folder / f"{name}-ubyte"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: {restore}")
        content = path.read_bytes()
        try:
            # Two zeros, a type, the rank, big-endian sizes, then uint8 values.
            shape = np.frombuffer(content, ">u4", content[3], offset=4)
            values = np.frombuffer(content, np.uint8, offset=4 + shape.nbytes).reshape(shape)
        except (IndexError, ValueError) as error:
            size = len(content)
            raise ValueError(f"{path} is damaged: {size} bytes ({error}); {restore}") from None
        parts.append(torch.tensor(values))
    train_images, train_targets, test_images, test_targets = parts
    train = train_images.unsqueeze(1), train_targets.long()
    test = test_images.unsqueeze(1), test_targets.long()
    return train, test


def _read_torchvision(name: str, root: Path, download: bool) -> list[_Part]:
    require("torchvision", f"data set {name}")
    # Here, and not at the top: the import takes a second in every process.
    import torchvision

    class_name, folder_name = _TORCHVISION[name]
    make = getattr(torchvision.datasets, class_name)
    folder = root / folder_name
    if not folder.is_dir() and not download:
        raise FileNotFoundError(
            f"{name} is not in {root} (LABKIT_DATA names another folder). Get it with --download, "
            f'or labkit.load_dataset("{name}", download=True); digits need no download'
        )
    try:
        if not folder.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            # Beside, and moved there once complete: no partial set is left.
            with tempfile.TemporaryDirectory(dir=root, prefix="download-") as scratch:
                make(scratch, download=True)
                Path(scratch, folder_name).rename(folder)
        halves = [make(root, train=True), make(root, train=False)]
    # Which error is raised depends on the set, and on the byte at which its file was cut.
    except Exception as error:
        raise ValueError(
            f"{name} cannot be had in {folder} ({' '.join(str(error).split())}). Check the "
            "network and download it again, without that folder if it is damaged"
        ) from None
    parts = []
    for half in halves:
        images = torch.as_tensor(half.data)
        channels_first = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
        parts.append((channels_first.contiguous(), torch.as_tensor(half.targets).long()))
    return parts


def is_folder(name: str) -> bool:
    """True if the name of a data set means a folder, which may not exist."""
    return name not in DATASETS and (os.sep in name or os.path.isdir(name))


def open_folder(
    name: str, *, train_size: int | None = None, resize: int | None = None, crop: bool = False
) -> tuple[Dataset, Dataset | None]:
    """The images to train on, and held-out ones if there are any: ([3, H, W] uint8, class).

    Args:
        name: of a folder with train and perhaps val or test in it, each with a folder per class.
        train_size: the number of training images, spread evenly over all of them; None for all.
        resize: height and width; None keeps the size of each image.
        crop: with ``resize``, take a random part of each training image, and scale that.
    """
    folder = Path(name)
    if not (folder / "train").is_dir():
        raise ValueError(
            f"there is no folder {folder / 'train'}: give a folder with train and val in it, each "
            "with a folder of images per class"
        )
    images = _images_in(folder / "train", resize, crop)
    train = images
    count = len(images)
    if train_size is not None:
        if train_size > count:
            raise ValueError(f"train_size {train_size}: {name} has {count} training images")
        train = Subset(images, [i * count // train_size for i in range(train_size)])
    held_out = [folder / part for part in ("val", "test") if (folder / part).is_dir()]
    if not held_out:
        return train, None
    test = _images_in(held_out[0], resize, crop=False)
    if test.classes != images.classes:
        raise ValueError(f"{folder} has classes {images.classes} and held out {test.classes}")
    return train, test


def _images_in(folder: Path, resize: int | None, crop: bool) -> Any:
    require("torchvision", "a folder of images")
    from torchvision.datasets import folder as folders
    from torchvision.transforms import v2

    def load(path: str) -> Any:
        check_regular(path)
        try:
            return folders.pil_loader(path)
        # Pillow raises errors of many kinds for damaged files.
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as an image ({error}): replace it, or remove it"
            ) from None

    steps: list[Any] = [v2.PILToTensor()]
    if resize is not None:
        change = v2.RandomResizedCrop if crop else v2.Resize
        steps.insert(0, change((resize, resize), interpolation=v2.InterpolationMode.BICUBIC))

    class Images(folders.ImageFolder):
        """Without what programs hide in folders, such as Jupyter's .ipynb_checkpoints."""

        def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
            names, _ = super().find_classes(directory)
            shown = [name for name in names if not name.startswith(".")]
            return shown, {name: number for number, name in enumerate(shown)}

    def is_shown_image(path: str) -> bool:
        parts = Path(path).relative_to(folder).parts
        is_shown = not any(part.startswith(".") for part in parts)
        return is_shown and folders.is_image_file(path)

    transform = v2.Compose(steps)
    return Images(str(folder), transform=transform, loader=load, is_valid_file=is_shown_image)
