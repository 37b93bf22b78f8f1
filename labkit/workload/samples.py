"""The share of samples of each rank, and from stored samples to batches of a model's inputs.

The sampler is three pure functions, so no rank has to send indices:

    order = epoch_order(len(data.train_targets), epoch=epoch, seed=seed)    the same on all ranks
    for batch in batch_slices(order, batch_size):                           the global batches
        part = share(batch, rank, world_size)                               this rank's part

Unlike torch.utils.data.DistributedSampler, no sample is repeated to make the shares equal: their
sizes differ by at most one, and a share may be empty.

``Samples`` are read by number, augmented, standardised. A sample's random numbers depend on seed,
epoch and its number alone, whichever rank reads it, and also after a run was resumed.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

# Inputs [n, ...] and targets [n, ...].
Pair = tuple[Tensor, Tensor]


def epoch_order(num_samples: int, *, epoch: int, seed: int) -> Tensor:
    """The order of an epoch: [num_samples] int64, each index once, the same on all ranks."""
    # Not seed + epoch: epoch 1 of seed 0 would be epoch 0 of seed 1.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)
    return torch.randperm(num_samples, generator=generator)


def batch_slices(order: Tensor, batch_size: int) -> Sequence[Tensor]:
    """Cut an epoch's order into global batches of ``batch_size``; the last may be smaller."""
    return order.split(batch_size) if len(order) else ()


def share(batch: Tensor, index: int, count: int) -> Tensor:
    """Part ``index`` of ``count`` parts of a batch: contiguous, sizes differ by at most one.

    In order, the parts make up the batch. Part 0 of 0 is empty: the share of a parameter server.
    """
    return batch.tensor_split(count)[index] if count else batch[:0]


def seed_all(seed: int) -> None:
    """Seed torch (on the CPU alone: no look for GPUs), ``random`` and NumPy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch, ``random`` and NumPy from ``seed``; afterwards they go on."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            seed_all(seed)
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


class Standard(NamedTuple):
    """Stored pixels: the largest possible value, mean and deviation by channel, from 0 to 1."""

    white: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class Transform:
    """Turns stored images [..., C, H, W] into a model's inputs, with torchvision's transforms.

    Attributes:
        standard: to give each channel mean 0 and deviation 1; None for inputs as they are stored.
        augment: names of ``config.AUGMENTATIONS``; ``crop`` moves an image, by four pixels at
            most, and fills with black.
        resize: height and width, with bicubic interpolation; None keeps them.
    """

    standard: Standard | None = None
    augment: tuple[str, ...] = ()
    resize: int | None = None

    def __call__(self, images: Tensor, dtype: torch.dtype, *, draw: bool = False) -> Tensor:
        """Return a model's inputs; with ``draw`` those of one image, augmented at random."""
        if (self.augment or self.resize) and images.ndim < 3:
            raise ValueError(
                "augment and resize are for images [channels, height, width], and inputs have "
                f"shape {list(images.shape)}: leave them out"
            )
        if self.standard is not None:
            images = images.to(dtype).div(self.standard.white)
        if draw:
            images = _augmentation(self.augment, *images.shape[-2:])(images)
        if self.resize is not None:
            from torchvision.transforms.v2 import InterpolationMode, functional

            size = [self.resize, self.resize]
            bicubic = InterpolationMode.BICUBIC
            images = functional.resize(images.to(dtype), size, bicubic, antialias=True)
        if self.standard is None:
            return images
        mean = torch.tensor(self.standard.mean, dtype=dtype).view(-1, 1, 1)
        deviation = torch.tensor(self.standard.deviation, dtype=dtype).view(-1, 1, 1)
        return images.sub(mean).div_(deviation)


@functools.cache
def _augmentation(names: tuple[str, ...], height: int, width: int) -> Callable[[Tensor], Tensor]:
    # Not at the top: the import takes a second in every process.
    from torchvision.transforms import v2

    # The usual distance on 32 x 32 pixels; it would be half of a digit, which has 8 x 8.
    pad = 1 if min(height, width) < 16 else 4
    known = {
        "crop": v2.RandomCrop((height, width), padding=pad),
        "flip": v2.RandomHorizontalFlip(),
        "randaugment": v2.RandAugment(),
        "colorjitter": v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
        "erasing": v2.RandomErasing(),
    }
    return v2.Compose([change for name, change in known.items() if name in names])


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples by their numbers.

    Attributes:
        dataset: a ``TensorDataset``, or a map-style Dataset of items (input, target).
        dtype: of inputs and targets that are floats; integers stay as they are.
        transform: of the inputs.
        seed: of the random numbers, which the Dataset may draw, too.
        classes: their number, if that is known.
    """

    dataset: Dataset
    dtype: torch.dtype = torch.float32
    transform: Transform = field(default_factory=Transform)
    seed: int = 0
    classes: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def first(self, count: int) -> Pair:
        """The first ``count`` samples, or all, as one batch."""
        return self.read(torch.arange(min(count, len(self))))

    def batches(
        self, numbers: Iterable[Tensor], *, pinned: bool = False, epoch: int | None = None
    ) -> Iterator[Pair]:
        """The samples of each batch, given their numbers [n].

        ``pinned`` memory is page-locked: a GPU copies from it without a wait. Augmentation depends
        on ``epoch``, counted from 0; None is for none of it.
        """
        for batch in numbers:
            inputs, targets = self.read(batch, epoch)
            if pinned:
                inputs = inputs.pin_memory()
                targets = targets.pin_memory()
            yield inputs, targets

    def read(self, numbers: Tensor, epoch: int | None = None) -> Pair:
        """The samples of one batch; none of them as an empty one."""
        transform = self.transform
        draw = epoch is not None and bool(transform.augment)
        if isinstance(self.dataset, TensorDataset) and not draw:
            inputs, targets = self.dataset[numbers]
            return transform(inputs, self.dtype), targets
        items = []
        with seeded(self.seed):
            # An empty batch has the shape of a sample, too.
            for number in numbers.tolist() or [0]:
                parts = self.seed, 0 if epoch is None else epoch + 1, number
                seed_all(int(np.random.SeedSequence(parts).generate_state(1)[0]))
                try:
                    item = self.dataset[number]
                except (IndexError, KeyError) as error:
                    raise ValueError(
                        f"dataset says that it has {len(self)} samples, and raises "
                        f"{type(error).__name__} for number {number}: {error}"
                    ) from error
                if not isinstance(item, (tuple, list)) or len(item) != 2:
                    kind = type(item).__name__
                    raise ValueError(f"a sample of dataset is a {kind}, not a pair (x, y)")
                if transform != Transform():
                    image = torch.as_tensor(item[0])
                    item = transform(image, self.dtype, draw=draw), item[1]
                items.append(tuple(item))
        try:
            parts = default_collate(items)
        except (RuntimeError, TypeError) as error:
            shapes = {str(list(torch.as_tensor(item[0]).shape)) for item in items}
            raise ValueError(
                f"samples {numbers.tolist()[:4]} of dataset and those after them are no batch "
                f"({error}): the inputs have shapes {', '.join(sorted(shapes)[:4])}. Give all "
                "samples one shape, as by resize or by padding"
            ) from error
        for part in parts:
            if not isinstance(part, Tensor):
                raise ValueError(
                    f"the samples of dataset are collated to a {type(part).__name__}: return a "
                    "tensor, a NumPy array or a number as input and as target"
                )
        inputs, targets = (as_dtype(part[: len(numbers)], self.dtype) for part in parts)
        return inputs, targets


def samples_of(part: Any, dtype: torch.dtype, seed: int) -> Samples:
    """A learner's own samples: tensors (x, y), a TensorDataset, or a map-style Dataset."""
    if isinstance(part, TensorDataset):
        part = part.tensors
    if _are_arrays(part):
        for array in part:
            if isinstance(array, np.ndarray) and array.dtype.kind not in "biufc":
                raise ValueError(
                    f"an array of dataset holds {array.dtype}, not numbers: use .astype(float), "
                    "or .astype(int) for classes; samples of different sizes need padding"
                )
        inputs, targets = (as_dtype(torch.as_tensor(x).detach().cpu(), dtype) for x in part)
        if inputs.dim() == 0 or targets.dim() == 0 or len(inputs) != len(targets):
            raise ValueError(
                f"inputs {list(inputs.shape)} and targets {list(targets.shape)} of dataset are "
                "not of equally many samples: the first dimension of both counts them"
            )
        part = TensorDataset(inputs, targets)
    no_map = isinstance(part, (IterableDataset, DataLoader, str))
    if no_map or not hasattr(part, "__getitem__") or not hasattr(part, "__len__"):
        raise ValueError(
            f"dataset is of type {type(part).__name__}, and labkit makes the batches: give a "
            "map-style Dataset, such as a DataLoader's dataset, tensors (x, y), or two of them"
        )
    return Samples(part, dtype, seed=seed)


def parts_of(dataset: Any, dtype: torch.dtype, seed: int = 0) -> tuple[Samples, Samples | None]:
    """A learner's own samples, see ``samples_of``, or a pair: to train on, and held out."""
    is_pair = isinstance(dataset, (tuple, list)) and len(dataset) == 2 and not _are_arrays(dataset)
    parts = dataset if is_pair else [dataset]
    train, *held_out = [samples_of(part, dtype, seed) for part in parts]
    if len(train) == 0:
        raise ValueError("dataset has no samples to train on: give one at least")
    return train, held_out[0] if held_out else None


def first_of(samples: Samples, size: int) -> Samples:
    """Return the first ``size`` of a learner's own samples."""
    if not 1 <= size <= len(samples):
        raise ValueError(f"train_size {size}: dataset has {len(samples)} training samples")
    if isinstance(samples.dataset, TensorDataset):
        tensors = [tensor[:size] for tensor in samples.dataset.tensors]
        return replace(samples, dataset=TensorDataset(*tensors))
    return replace(samples, dataset=Subset(samples.dataset, range(size)))


def num_classes(samples: Samples) -> int:
    """The number of the Dataset's ``classes``, or the largest target plus one."""
    dataset: Any = samples.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    known = samples.classes or len(getattr(dataset, "classes", ()))
    if known:
        return known
    count = len(samples)
    targets = torch.stack([torch.as_tensor(samples.dataset[i][1]) for i in range(count)])
    if not is_integer(targets) or targets.dim() != 1:
        raise ValueError(
            "the targets of dataset are not one class each, and labkit's models predict classes: "
            "give your own model, too"
        )
    return int(targets.max()) + 1


def is_integer(tensor: Tensor) -> bool:
    """True if a tensor holds integers, such as classes."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats in ``dtype``; anything else as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def on_device(batch: Iterable[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """The parts of a batch on ``device``; a copy to a GPU is queued, and not waited for."""
    return tuple(part.to(device, non_blocking=device.type == "cuda") for part in batch)


def _are_arrays(part: Any) -> bool:
    is_pair = isinstance(part, (tuple, list)) and len(part) == 2
    return is_pair and all(isinstance(x, (Tensor, np.ndarray)) for x in part)
