"""A sketch of a data set, by which ranks that have made their own notice that theirs differ."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from labkit.workload.samples import Samples

# Samples that are compared: of those in memory up to so many values, or samples; else few.
_MOST_VALUES, _MANY, _FEW = 2**18, 512, 12
# The part of a sum that may be rounding: a rank may have another processor.
_ROUNDING = 1e-6

# The number of samples, and per part two sums for each compared sample, see ``_sums``.
Sketch = dict[str, Any]


def sketch(train: Samples, test: Samples | None, seed: int) -> Sketch:
    """Return lengths, and sums of samples that ``seed`` draws from the whole data set.

    Inputs or targets that differ from one reading to the next, as with random augmentations, have
    no sums.
    """
    lengths = {"training samples": len(train), "held-out samples": len(test) if test else 0}
    count = _FEW
    if isinstance(train.dataset, TensorDataset):
        values = max(1, train.dataset.tensors[0][:1].numel())
        count = min(max(_FEW, _MOST_VALUES // values), _MANY)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:count]
    first, second = train.read(order), train.read(order)
    sums: Sketch = {}
    for name, part, again in zip(("inputs", "targets"), first, second):
        if torch.equal(part, again) or isinstance(train.dataset, TensorDataset):
            sums[name] = _sums(part)
    return lengths | sums


def _sums(part: Tensor) -> list[list[float]]:
    """Return of each sample the weighted sum of its values, and that of their sizes."""
    values = torch.view_as_real(part.to(torch.complex128)).flatten(1).nan_to_num()
    weights = torch.linspace(1, 2, values.shape[1], dtype=torch.float64)
    return torch.stack([values @ weights, values.abs() @ weights], dim=1).tolist()


def check_same(rank: int, here: Sketch, there: Sketch) -> None:
    """Raise ValueError if this rank's data set is not the one that the run began with.

    ``here`` is the sketch of this rank, ``there`` that of the process that began the run.
    """
    for name in here.keys() & there.keys():
        if _is_close(here[name], there[name]):
            continue
        difference = f"{here[name]} {name} here and {there[name]} there"
        if isinstance(here[name], list):
            pairs = list(zip(here[name], there[name]))
            differ = sum(not _is_close([ours], [theirs]) for ours, theirs in pairs)
            difference = f"{differ} of {len(pairs)} compared {name}"
        raise ValueError(
            f"the data set of rank {rank} differs from that with which the run began: "
            f"{difference}. Every rank makes its own: seed each generator in the function or "
            "class that makes it, sort what os.listdir returns, and number classes by "
            "sorted(set(...))"
        )


def _is_close(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, list):
        return ours == theirs
    if len(ours) != len(theirs):
        return False
    sums = torch.tensor([ours, theirs], dtype=torch.float64)
    slack = _ROUNDING * sums[:, :, 1].sum(0)
    return bool(((sums[0, :, 0] - sums[1, :, 0]).abs() <= slack).all())
