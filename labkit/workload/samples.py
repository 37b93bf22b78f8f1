"""Samples by their numbers: tensors in memory, or a ``torch.utils.data.Dataset``."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
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
from labkit.workload.random_numbers import SeededReader, sample_seeds

# Inputs [n, ...] and targets [n, ...].
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class TensorSamples:
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
    _readers: "_Readers" = field(default_factory=lambda: _Readers(), repr=False)

    def __len__(self) -> int:
        return len(self.targets)

    def batches(
        self,
        numbers: Iterable[Tensor],
        num_workers: int = 0,
        *,
        pinned: bool = False,
        epoch: int | None = None,
    ) -> Iterator[Pair]:
        """The samples of each of some batches of ``numbers``, [n] each.

        Args:
            numbers: the samples of each batch.
            num_workers: processes that make batches ahead; 0 makes them when they are needed.
            pinned: put batches into page-locked memory, from which a GPU copies without a wait.
            epoch: counted from 0, on which augmentation depends; None for none of it.
        """
        if num_workers:
            return self._readers.batches(self, numbers, num_workers, pinned, epoch)
        if self.transform:
            made = (self.read(batch, epoch) for batch in numbers)
            return map(_pinned, made) if pinned else made
        pick = _picked_into_pinned if pinned else operator.getitem
        return ((pick(self.inputs, batch), pick(self.targets, batch)) for batch in numbers)

    @cached_property
    def sample_values(self) -> int:
        """How many numbers the input of one sample has."""
        return self.read(torch.arange(1))[0].numel()

    def read(self, numbers: Tensor, epoch: int | None = None) -> Pair:
        """The samples of one batch."""
        inputs = self.inputs[numbers]
        if self.transform:
            inputs = self.transform(inputs, numbers, epoch)
        return inputs, self.targets[numbers]


@dataclass(frozen=True, eq=False)
class DatasetSamples:
    """Samples of a map-style Dataset, read when they are needed, in the default collation.

    Random numbers that the Dataset draws for a sample, from the global generators of torch,
    ``random`` and NumPy, depend on seed, epoch and the sample's number alone.

    Attributes:
        dataset: of items (input, target).
        dtype: of inputs and targets that are floats; integers stay as they are.
        transform: makes a batch of inputs from those of the Dataset; None leaves them.
        seed: of the random numbers.
    """

    dataset: Dataset
    dtype: torch.dtype
    transform: Transform | None = None
    seed: int = 0
    _readers: "_Readers" = field(default_factory=lambda: _Readers(), repr=False)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(
        self,
        numbers: Iterable[Tensor],
        num_workers: int = 0,
        *,
        pinned: bool = False,
        epoch: int | None = None,
    ) -> Iterator[Pair]:
        """As ``TensorSamples.batches``."""
        if num_workers:
            return self._readers.batches(self, numbers, num_workers, pinned, epoch)
        made = (self.read(batch, epoch) for batch in numbers)
        return map(_pinned, made) if pinned else made

    @cached_property
    def sample_values(self) -> int:
        """As ``TensorSamples.sample_values``."""
        return self.read(torch.arange(1))[0].numel()

    def read(self, numbers: Tensor, epoch: int | None = None) -> Pair:
        """The samples of one batch; none of them as an empty one.

        Raises:
            ValueError: samples that are not pairs, or differ in shape.
        """
        # An empty batch has the shape of a sample, too.
        some = numbers if len(numbers) else torch.zeros(1, dtype=torch.int64)
        items = self._read(some.tolist(), partial(self._seeds, some, epoch))
        if self.transform and self.transform.resize:
            items = self.transform.one_size(items)
        inputs, targets = (as_dtype(part[: len(numbers)], self.dtype) for part in _stacked(items))
        return self.transform(inputs, numbers, epoch) if self.transform else inputs, targets

    def _seeds(self, numbers: Tensor, epoch: int | None) -> list[int]:
        return sample_seeds(self.seed, -1 if epoch is None else epoch, numbers)

    @cached_property
    def _read(self) -> SeededReader:
        return SeededReader(partial(_items, self.dataset))


def _items(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    # A Dataset may read several samples faster together; PyTorch's DataLoader asks so, too.
    if getattr(dataset, "__getitems__", None):
        return list(dataset.__getitems__(list(numbers)))
    return [dataset[number] for number in numbers]


class _Readers:
    """Processes that make batches ahead. They stay from one epoch to the next.

    To start them takes as long as some steps.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[Tensor, int | None]] = []
        self.loader: DataLoader | None = None

    def batches(
        self,
        samples: "Samples",
        numbers: Iterable[Tensor],
        num_workers: int,
        pinned: bool,
        epoch: int | None,
    ) -> Iterator[Pair]:
        # In place: the loader's sampler is this list.
        self.requests[:] = [(batch, epoch) for batch in numbers]
        if self.loader is None:
            self.loader = DataLoader(
                # A copy that does not know these processes: without a cycle of references, they
                # end with the samples.
                _Batches(replace(samples, _readers=_Readers())),
                batch_size=None,
                sampler=self.requests,
                num_workers=num_workers,
                collate_fn=_unchanged,
                pin_memory=pinned,
                persistent_workers=True,
                # Without one of its own it would take a number from the global generator.
                generator=torch.Generator(),
            )
        return iter(self.loader)


class _Batches(Dataset):
    """Batches by their numbers, as a DataLoader reads them."""

    def __init__(self, samples: "Samples"):
        self.samples = samples

    def __getitem__(self, index: tuple[Tensor, int | None]) -> Pair:
        return self.samples.read(*index)


def _unchanged(batch: Any) -> Any:
    return batch


def _pinned(batch: Pair) -> Pair:
    return batch[0].pin_memory(), batch[1].pin_memory()


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
        return _in_memory(part, dtype, name)
    if not hasattr(part, "__getitem__") or not hasattr(part, "__len__") or isinstance(part, str):
        raise ValueError(
            f"{name} is of type {type(part).__name__}: give a map-style Dataset (__getitem__ and "
            "__len__), tensors (x, y), or a pair of them, one to train on and one held out"
        )
    if not len(part):
        raise ValueError(f"{name} has no samples: nothing to train on or to test with")
    return DatasetSamples(part, dtype, seed=seed)


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
    elif hasattr(_whole(samples.dataset), "classes"):
        return len(_whole(samples.dataset).classes)
    else:
        targets = torch.as_tensor([samples.dataset[index][1] for index in range(len(samples))])
    if not is_integer(targets) or targets.dim() != 1:
        raise ValueError(
            f"the targets of dataset are {targets.dtype} {list(targets.shape)}, not one class "
            "each, and labkit's models predict classes: give your own model, too"
        )
    return int(targets.max()) + 1


def _whole(dataset: Any) -> Any:
    """The Dataset of which this is a part."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


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
                "crop or pad them to one shape in the Dataset, or scale them with resize"
            )
    return f"the samples of dataset cannot be put into one batch ({error})"
