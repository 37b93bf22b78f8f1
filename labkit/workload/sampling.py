"""The sampler: which rank works on which samples of an epoch.

Three pure functions: every rank computes its indices itself, so no rank has to send them:

    order = epoch_order(len(data.train_targets), epoch=epoch, seed=seed)    the same on all ranks
    for batch in batch_slices(order, batch_size):                           the global batches
        mine = share(batch, rank, world_size)                               this rank's part

Unlike torch.utils.data.DistributedSampler, no sample is repeated to make the shares equal: in an
epoch each sample is used exactly once, and the sizes of the shares differ by at most one. The mean
over a global batch is therefore the mean over the shares weighted by len(mine) / len(batch), and a
share may be empty.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def epoch_order(num_samples: int, *, epoch: int, seed: int) -> Tensor:
    """The order of an epoch: [num_samples] int64, each index once, the same on all ranks.

    It depends on epoch and seed alone, not on the global random state.
    """
    # Not seed + epoch: epoch 1 of seed 0 would be epoch 0 of seed 1.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)
    return torch.randperm(num_samples, generator=generator)


def batch_slices(order: Tensor, batch_size: int) -> Sequence[Tensor]:
    """Cut an epoch's order into global batches of ``batch_size``; the last may be smaller.

    Returns ceil(len(order) / batch_size) views, none for an empty order.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is at least 1, got {batch_size}")
    return order.split(batch_size) if len(order) else ()


def share(batch: Tensor, index: int, count: int) -> Tensor:
    """Part ``index`` of ``count`` parts of a batch: contiguous, sizes differ by at most one.

    The first len(batch) % count parts have the extra sample; with fewer samples than parts the
    last ones are empty. In order, the parts make up the batch. Part 0 of 0 is empty: the share of
    a parameter server.
    """
    if (index, count) == (0, 0):
        return batch[:0]
    if count < 1 or not 0 <= index < count:
        raise ValueError(f"share {index} of {count}: the index must be 0 .. count - 1")
    return batch.tensor_split(count)[index]
