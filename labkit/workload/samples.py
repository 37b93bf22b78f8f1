"""Samples by their numbers: tensors in memory, or a ``torch.utils.data.Dataset``."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from labkit.units import format_count

# Inputs [n, ...] and targets [n, ...].
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class TensorSamples:
    """Samples that are in memory.

    Attributes:
        inputs, targets: [N, ...] each.
        classes: how many there are, if that is known.
    """

    inputs: Tensor
    targets: Tensor
    classes: int | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def batches(
        self, numbers: Iterable[Tensor], num_workers: int = 0, *, pinned: bool = False
    ) -> Iterator[Pair]:
        """The samples of each of some batches of ``numbers``, [n] each.

        Args:
            numbers: the samples of each batch.
            num_workers: for a Dataset.
            pinned: put batches into page-locked memory, from which a GPU copies without a wait.
        """
        pick = _picked_into_pinned if pinned else operator.getitem
        return ((pick(self.inputs, batch), pick(self.targets, batch)) for batch in numbers)


@dataclass(frozen=True, eq=False)
class DatasetSamples:
    """Samples of a map-style Dataset, read when they are needed, in the default collation.

    Attributes:
        dataset: of items (input, target).
        dtype: of inputs and targets that are floats; integers stay as they are.
    """

    dataset: Dataset
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(
        self, numbers: Iterable[Tensor], num_workers: int = 0, *, pinned: bool = False
    ) -> Iterator[Pair]:
        """As ``TensorSamples.batches``, read ahead by ``num_workers`` processes."""
        loader = DataLoader(
            self.dataset,
            batch_sampler=[batch.tolist() for batch in numbers],
            num_workers=num_workers,
            collate_fn=self.collate,
            pin_memory=pinned,
        )
        return iter(loader)

    def collate(self, items: Sequence[Any]) -> Pair:
        """Samples as one batch; none of them as an empty one.

        Raises:
            ValueError: samples that are not pairs, or differ in shape.
        """
        inputs, targets = _stacked(items or [self.dataset[0]])
        count = len(items)
        return as_dtype(inputs[:count], self.dtype), as_dtype(targets[:count], self.dtype)


Samples = TensorSamples | DatasetSamples


def samples_of(part: Any, dtype: torch.dtype, name: str = "dataset") -> Samples:
    """A learner's own samples: tensors (x, y), a TensorDataset, or a map-style Dataset.

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
        return _in_memory(part, dtype, name)
    if not hasattr(part, "__getitem__") or not hasattr(part, "__len__") or isinstance(part, str):
        raise ValueError(
            f"{name} is of type {type(part).__name__}: give a map-style Dataset (__getitem__ and "
            "__len__), tensors (x, y), or a pair of them, one to train on and one held out"
        )
    if not len(part):
        raise ValueError(f"{name} has no samples: nothing to train on or to test with")
    return DatasetSamples(part, dtype)


def parts_of(dataset: Any, dtype: torch.dtype) -> tuple[Samples, Samples | None]:
    """A learner's own data: samples to train on, and held-out ones if there are any.

    Args:
        dataset: samples as ``samples_of`` takes them, or a pair of them.
        dtype: of floats.

    Raises:
        ValueError: as ``samples_of``.
    """
    if isinstance(dataset, (tuple, list)) and len(dataset) == 2 and not _are_arrays(dataset):
        train, test = dataset
        train = samples_of(train, dtype, "dataset's first part")
        return train, samples_of(test, dtype, "dataset's second part")
    return samples_of(dataset, dtype), None


def first_samples(samples: Samples, count: int) -> Pair:
    """The first ``count`` samples, or all, as one batch."""
    return next(samples.batches([torch.arange(min(count, len(samples)))]))


def num_classes(samples: Samples) -> int:
    """The number of classes: that of the Dataset's ``classes``, or the largest target plus one.

    Raises:
        ValueError: the targets are not classes.
    """
    if isinstance(samples, TensorSamples):
        if samples.classes is not None:
            return samples.classes
        targets = samples.targets
    elif hasattr(samples.dataset, "classes"):
        return len(samples.dataset.classes)
    else:
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


def _picked_into_pinned(tensor: Tensor, numbers: Tensor) -> Tensor:
    """``tensor[numbers]``, in memory that PyTorch keeps for the next batch of this size."""
    # One batch at a time: a system grants little page-locked memory, and data sets are large.
    shape = len(numbers), *tensor.shape[1:]
    picked = torch.empty(shape, dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, numbers, out=picked)


def _are_arrays(part: Any) -> bool:
    """Whether ``part`` is a pair of tensors or NumPy arrays."""
    is_pair = isinstance(part, (tuple, list)) and len(part) == 2
    return is_pair and all(isinstance(x, Tensor) or type(x).__module__ == "numpy" for x in part)


def _in_memory(part: Sequence[Any], dtype: torch.dtype, name: str) -> TensorSamples:
    inputs, targets = (torch.as_tensor(x).detach().cpu() for x in part)
    sizes = f"inputs {list(inputs.shape)} and targets {list(targets.shape)}"
    if not inputs.dim() or not targets.dim() or len(inputs) != len(targets):
        raise ValueError(f"{name} has {sizes}: give one target for each input")
    if not len(inputs):
        raise ValueError(f"{name} has no samples ({sizes}): nothing to train on or to test with")
    return TensorSamples(as_dtype(inputs, dtype), as_dtype(targets, dtype))


def _stacked(items: Sequence[Any]) -> Pair:
    for item in items:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            size = f" of {format_count(len(item), 'part')}" if hasattr(item, "__len__") else ""
            raise ValueError(
                f"a sample of dataset is a {type(item).__name__}{size}: each has to be a pair "
                "(input, target)"
            )
    try:
        inputs, targets = default_collate([tuple(item) for item in items])
    except (RuntimeError, TypeError) as error:
        raise ValueError(_why_not_stacked(items, error)) from None
    for name, stacked in (("inputs", inputs), ("targets", targets)):
        if not isinstance(stacked, Tensor):
            raise ValueError(
                f"the {name} of dataset are collated to a {type(stacked).__name__}, not to one "
                "tensor: return a tensor, a NumPy array or a number for each sample"
            )
    return inputs, targets


def _why_not_stacked(items: Sequence[Any], error: Exception) -> str:
    for place, name in enumerate(("inputs", "targets")):
        found = {tuple(item[place].shape) for item in items if hasattr(item[place], "shape")}
        if len(found) > 1:
            shapes = " and ".join(str(list(shape)) for shape in sorted(found)[:2])
            return (
                f"the {name} of dataset differ in shape, as {shapes}, and a batch is one tensor: "
                "crop or pad them to one shape in the Dataset"
            )
    return f"the samples of dataset cannot be put into one batch ({error})"
