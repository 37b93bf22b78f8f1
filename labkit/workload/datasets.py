"""Data sets as tensors in memory.

No DataLoader: the sets are small, and its worker processes would disturb the measurements.
"""

import hashlib
import math
import os
import pickle
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.units import check_choice, spelled
from labkit.workload.models import import_torchvision

REPOSITORY_DATA = Path(__file__).resolve().parents[2] / "data"

# Images [N, C, H, W] uint8 and targets [N] of the training or the held-out part.
_Part = tuple[Tensor, Tensor]

# File, size in bytes, SHA-256; data/make_digits.py wrote them, data/README.md lists them.
_DIGITS_FILES = """\
train-images-idx3-ubyte 91984 29f287361ba63f4c1e31807f62dece0a3ce7ef58d575afb7390cd90a7f3a5790
train-labels-idx1-ubyte 1445 88b4e19a9f2f12d3602dd4127525c495b3a6437997bea80b9ba035341cf8da55
t10k-images-idx3-ubyte 23056 26b730c58aae552f4ee63dce0aae72c8f4f0382d91ec9ef076128c43985bbdcb
t10k-labels-idx1-ubyte 368 a351e0b1f5ae62b48b757c2676d9f9de215374c19c027345506bbd9ccf81f1ed
"""
_RESTORE = "restore it with `git checkout -- data/digits` in the workbook's folder"


# torchvision's class, and the folder that the class uses in its root.
_TORCHVISION = {
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
    "mnist": ("MNIST", "MNIST"),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST"),
}
DATASETS = ("digits", *_TORCHVISION, "fake")
# Classes, the largest possible pixel value, and by channel the mean and standard deviation of the
# training part, pixels scaled to 0 .. 1.
_STATISTICS = {
    "digits": (10, 16, (0.3054,), (0.3761,)),
    "mnist": (10, 255, (0.1307,), (0.3081,)),
    "fashion_mnist": (10, 255, (0.2860,), (0.3530,)),
    "cifar10": (10, 255, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": (100, 255, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


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
            generates this many.
        dtype: of the inputs.

    Raises:
        ValueError: unknown name, train_size out of range, or a file that is damaged.
        FileNotFoundError: the data are missing; the message says how to get them.
        ConnectionError: the download failed.
    """
    check_choice("data set", name, DATASETS)
    if train_size is not None and train_size < 1:
        raise ValueError(f"train_size is at least 1, got {train_size}")
    if name == "fake":
        return fake_data(train_size=train_size or 2048, dtype=dtype)
    if name == "digits":
        parts = _read_digits(Path(root or REPOSITORY_DATA / "digits"))
    else:
        root = root or os.environ.get("LABKIT_DATA") or REPOSITORY_DATA / "downloads"
        parts = _read_torchvision(name, Path(root), download)
    return _as_data(name, *parts, train_size, dtype)


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
    train_images, train_targets, test_images, test_targets = (
        _read_idx(folder, *line.split()) for line in _DIGITS_FILES.splitlines()
    )
    return (train_images.unsqueeze(1), train_targets), (test_images.unsqueeze(1), test_targets)


def _read_idx(folder: Path, name: str, size_bytes: str, sha256: str) -> Tensor:
    """Read a file of digits: two zeros, a type, the rank, big-endian sizes, then uint8 values."""
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {_RESTORE}")
    content = path.read_bytes()
    if len(content) != int(size_bytes):
        raise ValueError(
            f"{path} is damaged: {len(content)} bytes, expected {size_bytes}; {_RESTORE}"
        )
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{path} is damaged: SHA-256 {found}, expected {sha256}; {_RESTORE}")
    rank = content[3]
    shape = struct.unpack_from(f">{rank}I", content, offset=4)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * rank).view(shape)


def _read_torchvision(name: str, root: Path, download: bool) -> tuple[_Part, _Part]:
    folder = root / _TORCHVISION[name][1]
    if not folder.is_dir():
        if not download:
            raise FileNotFoundError(
                f"{name} is not in {root} (looked for {folder.name}). Get it with --download on "
                f'the command line or labkit.load_dataset("{name}", download=True) in a notebook; '
                "LABKIT_DATA names another folder; digits and fake need no download"
            )
        _fetch(name, folder)
    return _read_part(name, folder, train=True), _read_part(name, folder, train=False)


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
    # Which of these is raised depends on the set, and on the byte at which its file was cut.
    except (RuntimeError, OSError, EOFError, AssertionError, IndexError, TypeError, KeyError,
            ValueError, pickle.UnpicklingError) as error:  # fmt: skip
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{name} in {folder} is incomplete or damaged ({reason}): delete that folder, then "
            f'get it again with --download or labkit.load_dataset("{name}", download=True)'
        ) from error
    images, targets = torch.as_tensor(dataset.data), torch.as_tensor(dataset.targets)
    channels_first = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return channels_first, targets


def _as_data(
    name: str, train: _Part, test: _Part, train_size: int | None, dtype: torch.dtype
) -> Data:
    """Cut to ``train_size`` and standardise."""
    num_train = len(train[1])
    if train_size is not None and train_size > num_train:
        raise ValueError(f"train_size {train_size}: {name} has {num_train} training samples")
    num_classes, white, *by_channel = _STATISTICS[name]
    mean, deviation = (torch.tensor(v, dtype=dtype).view(1, -1, 1, 1) for v in by_channel)
    train_inputs, test_inputs = (
        images.to(dtype, memory_format=torch.contiguous_format)
        .div_(white)
        .sub_(mean)
        .div_(deviation)
        for images in (train[0][:train_size], test[0])
    )
    train_targets, test_targets = train[1][:train_size].long(), test[1].long()
    return Data(name, train_inputs, train_targets, test_inputs, test_targets, num_classes)
