"""A sketch of a data set, by which ranks that have made their own notice that theirs differ."""

from typing import Any

import torch
from torch.utils.data import TensorDataset

from labkit.workload.samples import Samples

# Compared at most: so many values and samples of data in memory, and few samples of other data.
_MOST_VALUES = 2**18
_MANY = 512
_FEW = 12
# The part of a sum that may be rounding: a rank may have another processor.
_ROUNDING = 1e-6

# The numbers of samples, and per part two sums for each compared sample.
Sketch = dict[str, Any]


def sketch(train: Samples, test: Samples | None, seed: int) -> Sketch:
    """Return lengths, and sums of samples that ``seed`` draws from the whole data set.

    Inputs or targets that differ from one reading to the next, as with random augmentations, have
    no sums.
    """
    count = _FEW
    if isinstance(train.dataset, TensorDataset):
        values = max(1, train.dataset.tensors[0][:1].numel())
        count = min(max(_FEW, _MOST_VALUES // values), _MANY)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train), generator=generator)[:count]
    first = train.read(order)
    second = train.read(order)
    sums_by_name: Sketch = {"lengths": [len(train), len(test) if test else 0]}
    for name, part, reread in zip(("inputs", "targets"), first, second):
        if isinstance(train.dataset, TensorDataset) or torch.equal(part, reread):
            numbers = torch.view_as_real(part.to(torch.complex128)).flatten(1).nan_to_num()
            weights = torch.linspace(1, 2, numbers.shape[1], dtype=torch.float64)
            sums = torch.stack([numbers @ weights, numbers.abs() @ weights], dim=1)
            sums_by_name[name] = sums.tolist()
    return sums_by_name


def check_same(rank: int, data: Sketch, first: Sketch) -> None:
    """Raise ValueError if this rank's data set is not the one that the run began with.

    ``first`` is the sketch of the process that began the run.
    """
    difference = _difference(data, first)
    if difference:
        raise ValueError(
            f"the data set of rank {rank} differs from that with which the run began: "
            f"{difference}. Every rank makes its own: seed each generator in the function or "
            "class that makes it, sort what os.listdir returns, and number classes by "
            "sorted(set(...))"
        )


def _difference(data: Sketch, first: Sketch) -> str:
    if data["lengths"] != first["lengths"]:
        return f"{data['lengths']} samples to train on and held out here, {first['lengths']} there"
    difference = ""
    for name in (data.keys() & first.keys()) - {"lengths"}:
        sums, magnitudes = torch.tensor(data[name], dtype=torch.float64).T
        first_sums, first_magnitudes = torch.tensor(first[name], dtype=torch.float64).T
        slack = _ROUNDING * (magnitudes + first_magnitudes)
        differing = int(((sums - first_sums).abs() > slack).sum())
        if differing:
            difference = f"{differing} of {len(sums)} compared {name}"
    return difference
