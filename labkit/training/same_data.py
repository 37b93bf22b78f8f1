"""A sketch of a data set, by which ranks that have made their own notice that theirs differ."""

from typing import Any

import torch
from torch.utils.data import TensorDataset

from labkit.workload.samples import Samples

# How much is compared: at most this many values and samples of data in memory; few of other data.
_MOST_VALUES, _MANY, _FEW = 2**18, 512, 12
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
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:count]
    first, second = train.read(order), train.read(order)
    found: Sketch = {"lengths": [len(train), len(test) if test else 0]}
    for name, part, again in zip(("inputs", "targets"), first, second):
        if torch.equal(part, again) or isinstance(train.dataset, TensorDataset):
            numbers = torch.view_as_real(part.to(torch.complex128)).flatten(1).nan_to_num()
            weights = torch.linspace(1, 2, numbers.shape[1], dtype=torch.float64)
            sums = torch.stack([numbers @ weights, numbers.abs() @ weights], dim=1)
            found[name] = sums.tolist()
    return found


def check_same(rank: int, here: Sketch, there: Sketch) -> None:
    """Raise ValueError if this rank's data set is not the one that the run began with.

    ``here`` is the sketch of this rank, ``there`` that of the process that began the run.
    """
    difference = ""
    if here["lengths"] != there["lengths"]:
        difference = (
            f"{here['lengths']} samples to train on and held out here, {there['lengths']} there"
        )
    for name in (here.keys() & there.keys()) - {"lengths"} if not difference else ():
        ours = torch.tensor(here[name], dtype=torch.float64)
        theirs = torch.tensor(there[name], dtype=torch.float64)
        slack = _ROUNDING * (ours[:, 1] + theirs[:, 1])
        differ = int(((ours[:, 0] - theirs[:, 0]).abs() > slack).sum())
        if differ:
            difference = f"{differ} of {len(ours)} compared {name}"
    if difference:
        raise ValueError(
            f"the data set of rank {rank} differs from that with which the run began: "
            f"{difference}. Every rank makes its own: seed each generator in the function or "
            "class that makes it, sort what os.listdir returns, and number classes by "
            "sorted(set(...))"
        )
