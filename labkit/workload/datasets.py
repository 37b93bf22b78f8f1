"""Data sets, as the bytes they are stored in, and as tensors in floating point."""

import contextlib
import math
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional

from labkit.files import write_private
from labkit.units import check_choice, spelled
from labkit.workload.images import Standard
from labkit.workload.models import import_torchvision

REPOSITORY_DATA = Path(__file__).resolve().parents[2] / "data"

# Images [N, C, H, W] uint8 and targets [N] of the training or the held-out part.
_Part = tuple[Tensor, Tensor]

_PARTS = ("train_images", "train_targets", "test_images", "test_targets")
# Of digits_augmented: as many as CIFAR has.
AUGMENTED_SIZE = 50_000
# How far a pixel of a copy may be brighter or darker, of 16.
_NOISE = 1

# data/make_digits.py wrote them, data/README.md lists them.
_DIGITS_FILES = (
    *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)
_RESTORE = "restore it with `git checkout -- data/digits` in the workbook's folder"

# torchvision's class, and the folder that the class uses in its root.
_TORCHVISION = {
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
    "mnist": ("MNIST", "MNIST"),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST"),
}
DATASETS = ("digits", *_TORCHVISION, "fake", "digits_augmented")
_STANDARDS = {
    "digits": Standard(16, (0.3054,), (0.3761,)),
    "mnist": Standard(255, (0.1307,), (0.3081,)),
    "fashion_mnist": Standard(255, (0.2860,), (0.3530,)),
    "cifar10": Standard(255, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Standard(255, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
_STANDARDS["digits_augmented"] = _STANDARDS["digits"]


@dataclass(frozen=True, eq=False)
class Data:
    """A data set in memory, on the CPU.

    Attributes:
        train_inputs: [N, C, H, W] in the requested dtype, each channel with mean 0, deviation 1.
        train_targets: [N] int64, 0 .. num_classes - 1.
        test_inputs: [M, C, H, W], never trained on.
        test_targets: [M] int64.
    """

    name: str
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    num_classes: int

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one sample."""
        _, channels, height, width = self.train_inputs.shape
        return channels, height, width


@dataclass(frozen=True, eq=False)
class StoredData:
    """A data set as bytes, on the CPU; they must not be written to.

    Attributes:
        train_images: [N, C, H, W] uint8.
        train_targets: [N] int64, 0 .. num_classes - 1.
        test_images: [M, C, H, W] uint8, never trained on.
        test_targets: [M] int64.
        standard: turns images into inputs.
    """

    name: str
    train_images: Tensor
    train_targets: Tensor
    test_images: Tensor
    test_targets: Tensor
    num_classes: int
    standard: Standard

    def in_floats(self, dtype: torch.dtype) -> Data:
        """All of it as a model's inputs."""
        train = self.standard(self.train_images, dtype), self.train_targets
        test = self.standard(self.test_images, dtype), self.test_targets
        return Data(self.name, *train, *test, self.num_classes)


@spelled
def load_dataset(
    name: str,
    *,
    root: str | Path | None = None,
    download: bool = False,
    train_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Data:
    """Load data set ``name``, one of ``DATASETS``.

    Args:
        root: the folder to look in. By default the workbook's data/digits for digits; for
            torchvision's sets the folder in the environment variable LABKIT_DATA, or else the
            workbook's data/downloads.
        download: fetch a torchvision set that is missing. Of several processes, let one download
            it first.
        train_size: keep only the first ``train_size`` training samples; None keeps all. ``fake``
            generates this many. ``digits_augmented`` has up to 50,000: the digits, and copies of
            them that are shifted by up to one pixel, with noise.
        dtype: of the inputs.

    Raises:
        ValueError: unknown name, train_size out of range, or a file that is damaged.
        FileNotFoundError: the data are missing; the message says how to get them.
        ConnectionError: the download failed.
    """
    check_choice("data set", name, DATASETS)
    if name == "fake":
        _check_size(train_size)
        return fake_data(train_size=train_size or 2048, dtype=dtype)
    stored = open_dataset(name, root=root, download=download, train_size=train_size)
    return stored.in_floats(dtype)


def open_dataset(
    name: str,
    *,
    root: str | Path | None = None,
    download: bool = False,
    train_size: int | None = None,
) -> StoredData:
    """As ``load_dataset``, as bytes, and for all names but ``fake``, which is made of floats."""
    _check_size(train_size)
    if name in _TORCHVISION:
        root = root or os.environ.get("LABKIT_DATA") or REPOSITORY_DATA / "downloads"
        train, test = _read_torchvision(name, Path(root), download)
    else:
        train, test = _read_digits(Path(root or REPOSITORY_DATA / "digits"))
    if name == "digits_augmented":
        train = _multiplied(train, min(train_size or AUGMENTED_SIZE, AUGMENTED_SIZE))
    num_train = AUGMENTED_SIZE if name == "digits_augmented" else len(train[1])
    if train_size is not None and train_size > num_train:
        raise ValueError(f"train_size {train_size}: {name} has {num_train} training samples")
    parts = train[0][:train_size], train[1][:train_size], *test
    return StoredData(name, *parts, 100 if name == "cifar100" else 10, _STANDARDS[name])


def _check_size(train_size: int | None) -> None:
    if train_size is not None and train_size < 1:
        raise ValueError(f"train_size is at least 1, got {train_size}")


def fake_data(
    *,
    train_size: int = 2048,
    test_size: int = 256,
    input_shape: tuple[int, int, int] = (3, 32, 32),
    num_classes: int = 10,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Data:
    """Noise of any shape, to measure without a download: inputs [train_size, *input_shape].

    Each class adds its own faint pattern to the noise, so that a model can learn and the loss
    falls.
    """
    generator = torch.Generator().manual_seed(seed)
    num_samples = train_size + test_size
    patterns = torch.randn((num_classes, *input_shape), generator=generator)
    targets = torch.randint(num_classes, (num_samples,), generator=generator)
    noise = torch.randn((num_samples, *input_shape), generator=generator)
    inputs = noise.mul_(math.sqrt(1 - 0.2**2)).add_(patterns[targets], alpha=0.2).to(dtype)
    train_inputs, test_inputs = inputs.split([train_size, test_size])
    train_targets, test_targets = targets.split([train_size, test_size])
    return Data("fake", train_inputs, train_targets, test_inputs, test_targets, num_classes)


def _read_digits(folder: Path) -> tuple[_Part, _Part]:
    found = []
    for name in _DIGITS_FILES:
        # Two zeros, a type, the rank, big-endian sizes, then uint8 values.
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: {_RESTORE}")
        content = bytearray(path.read_bytes())
        try:
            rank = content[3]
            shape = struct.unpack_from(f">{rank}I", content, offset=4)
            values = torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * rank)
            found.append(values.view(shape))
        except (IndexError, struct.error, RuntimeError, ValueError) as error:
            size = len(content)
            raise ValueError(f"{path} is damaged: {size} bytes ({error}); {_RESTORE}") from None
    train_images, train_targets, test_images, test_targets = found
    train = train_images.unsqueeze(1), train_targets.long()
    return train, (test_images.unsqueeze(1), test_targets.long())


def _multiplied(part: _Part, size: int) -> _Part:
    """The first ``size`` of: the digits, then one changed copy of all of them after another.

    Each copy has its own random numbers, so that a sample is the same whatever the size is.
    """
    images, targets = part
    height, width = images.shape[-2:]
    # The places at which an image of this size can be cut out of one with a border of one pixel.
    cuts = functional.pad(images, (1,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    copies = [images]
    for number in range(1, math.ceil(size / len(images))):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randint(-_NOISE, _NOISE + 1, images.shape, generator=generator)
        top, left = (torch.rand((len(images), 2), generator=generator) * 3).long().unbind(1)
        moved = cuts[torch.arange(len(images)), :, top, left] + noise
        copies.append(moved.clamp_(0, _STANDARDS["digits"].white).to(torch.uint8))
    return torch.cat(copies)[:size], targets.repeat(len(copies))[:size]


def _read_torchvision(name: str, root: Path, download: bool) -> tuple[_Part, _Part]:
    """Read a set once, and from then on a file of its tensors, whose memory processes share."""
    folder = root / _TORCHVISION[name][1]
    if not folder.is_dir():
        if not download:
            raise FileNotFoundError(
                f"{name} is not in {root} (looked for {folder.name}). Get it with --download on "
                f'the command line or labkit.load_dataset("{name}", download=True) in a notebook; '
                "LABKIT_DATA names another folder; digits and fake need no download"
            )
        _fetch(name, folder)
    path = folder / f".{name}.safetensors"
    sources = [one.stat().st_mtime_ns for one in folder.rglob("*") if one != path]
    if path.is_file() and path.stat().st_mtime_ns > max(sources, default=0):
        with contextlib.suppress(SafetensorError, KeyError, OSError):
            found = load_file(path)
            parts = [found[key] for key in _PARTS]
            return (parts[0], parts[1]), (parts[2], parts[3])
    train, test = (_read_part(name, folder, train=is_train) for is_train in (True, False))
    with contextlib.suppress(OSError):
        write_private(path, [save(dict(zip(_PARTS, (*train, *test))))], mode=0o644)
    return train, test


def _fetch(name: str, folder: Path) -> None:
    """Download beside ``folder`` and move it there once complete: no partial set is left."""
    dataset_class = _dataset_class(name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="download-") as scratch:
            dataset_class(scratch, download=True)
            Path(scratch, folder.name).rename(folder)
    except (OSError, RuntimeError, EOFError) as error:  # URLError is an OSError
        if folder.is_dir():  # another process was faster
            return
        reason = " ".join(str(error).split())
        raise ConnectionError(
            f"{name} could not be downloaded into {folder.parent}: {reason}. Check the network "
            f"and run it again, or copy {folder.name} there from a machine that has it; digits "
            "and fake need no download"
        ) from None


def _dataset_class(name: str) -> Any:
    return getattr(import_torchvision().datasets, _TORCHVISION[name][0])


def _read_part(name: str, folder: Path, *, train: bool) -> _Part:
    dataset_class = _dataset_class(name)
    try:
        dataset = dataset_class(folder.parent, train=train, download=False)
    # Which error is raised depends on the set, and on the byte at which its file was cut.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{name} in {folder} is incomplete or damaged ({reason}): delete that folder, then "
            f'get it again with --download or labkit.load_dataset("{name}", download=True)'
        ) from error
    images, targets = torch.as_tensor(dataset.data), torch.as_tensor(dataset.targets)
    channels_first = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return channels_first.contiguous(), targets.long()
