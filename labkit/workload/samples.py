"""Samples by their numbers: tensors in memory, or a ``torch.utils.data.Dataset``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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

from labkit.units import format_count
from labkit.workload.images import Transform
from labkit.workload.random_numbers import sample_seed, seedable

# Inputs [n, ...] and targets [n, ...].
Pair = tuple[Tensor, Tensor]


class _Batches:
    """What all samples have in common: batches by the numbers of their samples."""

    def batches(
        self, numbers: Iterable[Tensor], *, pinned: bool = False, epoch: int | None = None
    ) -> Iterator[Pair]:
        """The samples of each of some batches of ``numbers``, [n] each.

        Args:
            numbers: the samples of each batch.
            pinned: put batches into page-locked memory, from which a GPU copies without a wait.
            epoch: counted from 0, on which augmentation depends; None for none of it.
        """
        for batch in numbers:
            inputs, targets = self.read(batch, epoch)
            yield (inputs.pin_memory(), targets.pin_memory()) if pinned else (inputs, targets)

    def read(self, numbers: Tensor, epoch: int | None = None) -> Pair:
        """The samples of one batch."""
        raise NotImplementedError

    @cached_property
    def sample_values(self) -> int:
        """How many numbers the input of one sample has."""
        return self.read(torch.arange(1))[0].numel()


@dataclass(frozen=True, eq=False)
class TensorSamples(_Batches):
    """Samples that are in memory.

    Attributes:
        inputs, targets: [N, ...] each; inputs as ``transform`` takes them.
        classes: how many there are, if that is known.
        transform: makes a batch of inputs; None to use them as they are.
    """

    inputs: Tensor
    targets: Tensor
    classes: int | None = None
    transform: Transform | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, numbers: Tensor, epoch: int | None = None) -> Pair:
        inputs, transform = self.inputs[numbers], self.transform
        if transform is None:
            return inputs, self.targets[numbers]
        transform.check(tuple(inputs.shape[1:]))
        inputs = transform.scaled(inputs)
        if epoch is not None and transform.augment and len(numbers):
            images = []
            with seedable() as seed_all:
                for number, image in zip(numbers.tolist(), inputs, strict=True):
                    seed_all(sample_seed(transform.seed, epoch, number))
                    images.append(transform.augmented(image))
            inputs = torch.stack(images)
        return transform.finished(inputs), self.targets[numbers]


@dataclass(frozen=True, eq=False)
class DatasetSamples(_Batches):
    """Samples of a map-style Dataset, read when they are needed, in the default collation.

    Random numbers that the Dataset draws for a sample, from the global generators of torch,
    ``random`` and NumPy, depend on seed, epoch and the sample's number alone.

    Attributes:
        dataset: of items (input, target).
        dtype: of inputs and targets that are floats; integers stay as they are.
        transform: of each input; None leaves them.
        seed: of the random numbers.
    """

    dataset: Dataset
    dtype: torch.dtype
    transform: Transform | None = None
    seed: int = 0

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def read(self, numbers: Tensor, epoch: int | None = None) -> Pair:
        """The samples of one batch; none of them as an empty one.

        Raises:
            ValueError: samples that are not pairs, or differ in shape.
        """
        items, transform = [], self.transform
        with seedable() as seed_all:
            # An empty batch has the shape of a sample, too.
            for number in numbers.tolist() or [0]:
                seed_all(sample_seed(self.seed, epoch, number))
                item = self.dataset[number]
                _check_pair(item)
                if transform is not None:
                    image = torch.as_tensor(item[0])
                    transform.check(tuple(image.shape))
                    image = transform.scaled(image)
                    if epoch is not None and transform.augment:
                        image = transform.augmented(image)
                    item = transform.finished(image), item[1]
                items.append(item)
        inputs, targets = (as_dtype(part[: len(numbers)], self.dtype) for part in _stacked(items))
        return inputs, targets


Samples = TensorSamples | DatasetSamples


def samples_of(part: Any, dtype: torch.dtype, name: str = "dataset", seed: int = 0) -> Samples:
    """A learner's own samples: tensors (x, y), a TensorDataset, or a map-style Dataset.

    ``dtype`` is of floats, and ``seed`` of the random numbers that a Dataset draws.

    Raises:
        ValueError: anything else, no samples, or not as many targets as inputs.
    """
    if isinstance(part, IterableDataset):
        raise ValueError(
            f"{name} is an IterableDataset, whose samples have no numbers, so ranks cannot divide "
            "them: give a map-style Dataset (__getitem__ and __len__), or tensors (x, y)"
        )
    if isinstance(part, DataLoader):
        raise ValueError(f"{name} is a DataLoader, and labkit makes the batches: give its dataset")
    if isinstance(part, TensorDataset):
        part = part.tensors
    if _are_arrays(part):
        inputs, targets = (torch.as_tensor(x).detach().cpu() for x in part)
        sizes = f"inputs {list(inputs.shape)} and targets {list(targets.shape)}"
        if not inputs.dim() or not targets.dim() or len(inputs) != len(targets):
            raise ValueError(f"{name} has {sizes}: give one target for each input")
        part = TensorSamples(as_dtype(inputs, dtype), as_dtype(targets, dtype))
    elif not hasattr(part, "__getitem__") or not hasattr(part, "__len__") or isinstance(part, str):
        raise ValueError(
            f"{name} is of type {type(part).__name__}: give a map-style Dataset (__getitem__ and "
            "__len__), tensors (x, y), or a pair of them, one to train on and one held out"
        )
    else:
        part = DatasetSamples(part, dtype, seed=seed)
    if not len(part):
        raise ValueError(f"{name} has no samples: nothing to train on or to test with")
    return part


def parts_of(dataset: Any, dtype: torch.dtype, seed: int = 0) -> tuple[Samples, Samples | None]:
    """A learner's own data: samples to train on, and held-out ones if there are any.

    Args:
        dataset: samples as ``samples_of`` takes them, or a pair of them.
        dtype: of floats.
        seed: of the random numbers that a Dataset draws.

    Raises:
        ValueError: as ``samples_of``.
    """
    if isinstance(dataset, (tuple, list)) and len(dataset) == 2 and not _are_arrays(dataset):
        train, test = dataset
        train = samples_of(train, dtype, "dataset's first part", seed)
        return train, samples_of(test, dtype, "dataset's second part", seed)
    return samples_of(dataset, dtype, seed=seed), None


def first_samples(samples: Samples, count: int) -> Pair:
    """The first ``count`` samples, or all, as one batch."""
    return samples.read(torch.arange(min(count, len(samples))))


def num_classes(samples: Samples) -> int:
    """The number of classes: that of the Dataset's ``classes``, or the largest target plus one.

    Raises:
        ValueError: the targets are not classes.
    """
    if isinstance(samples, TensorSamples):
        if samples.classes is not None:
            return samples.classes
        targets = samples.targets
    else:
        whole: Any = samples.dataset
        while isinstance(whole, Subset):
            whole = whole.dataset
        if hasattr(whole, "classes"):
            return len(whole.classes)
        targets = torch.as_tensor([samples.dataset[index][1] for index in range(len(samples))])
    if not is_integer(targets) or targets.dim() != 1:
        raise ValueError(
            f"the targets of dataset are {targets.dtype} {list(targets.shape)}, not one class "
            "each, and labkit's models predict classes: give your own model, too"
        )
    return int(targets.max()) + 1


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor holds integers, such as classes."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats in ``dtype``; anything else as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def on_device(batch: Iterable[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """The parts of a batch on ``device``; a copy to a GPU is queued, and not waited for."""
    return tuple(part.to(device, non_blocking=device.type == "cuda") for part in batch)


def _are_arrays(part: Any) -> bool:
    """Whether ``part`` is a pair of tensors or NumPy arrays."""
    is_pair = isinstance(part, (tuple, list)) and len(part) == 2
    return is_pair and all(isinstance(x, Tensor) or type(x).__module__ == "numpy" for x in part)


def _check_pair(item: Any) -> None:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        size = f" of {format_count(len(item), 'part')}" if hasattr(item, "__len__") else ""
        raise ValueError(
            f"a sample of dataset is a {type(item).__name__}{size}: each has to be a pair "
            "(input, target)"
        )


def _stacked(items: Sequence[Any]) -> Pair:
    try:
        inputs, targets = default_collate([tuple(item) for item in items])
    except (RuntimeError, TypeError) as error:
        for place, name in enumerate(("inputs", "targets")):
            found = {tuple(item[place].shape) for item in items if hasattr(item[place], "shape")}
            if len(found) > 1:
                shapes = " and ".join(str(list(shape)) for shape in sorted(found)[:2])
                raise ValueError(
                    f"the {name} of dataset differ in shape, as {shapes}, and a batch is one "
                    "tensor: crop or pad them to one shape in the Dataset, or scale them with "
                    "resize"
                ) from None
        raise ValueError(f"the samples of dataset do not fit in one batch ({error})") from None
    for name, stacked in (("inputs", inputs), ("targets", targets)):
        if not isinstance(stacked, Tensor):
            raise ValueError(
                f"the {name} of dataset are collated to a {type(stacked).__name__}, not to one "
                "tensor: return a tensor, a NumPy array or a number for each sample"
            )
    return inputs, targets
