"""The check of page 01: gradient accumulation.

Symbols: P ranks, N elements of a gradient.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from labkit.check.grading import WORLD_SIZES, Case, Target, Verdict, returns


def accumulate(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradients, num_samples, batch_size)``: accumulate, then all-reduce once.

    ``gradients`` holds the mean [N] over each micro-batch of this rank, ``num_samples`` their
    sizes; expected is the mean over the ``batch_size`` samples of all ranks. Target: 2 (P - 1)
    messages.
    """
    return returns(
        fn,
        _mean_over_samples,
        name="one_device.accumulate",
        inputs=lambda r, c: (list(_gradients(r, c)), _num_samples(r, c), _batch_size(c)),
        signature="comm, gradients, num_samples, batch_size",
        target=_one_all_reduce,
        # A mistake's id -> what it returns on rank r. c is the case.
        mistakes={
            "accumulate.mean_of_means": (
                lambda r, c: c.over_ranks(lambda r: _gradients(r, c).mean(0)) / c.world_size
            ),
            "accumulate.sum": lambda r, c: _mean_over_samples(r, c) * _batch_size(c),
            "accumulate.own_samples": (
                lambda r, c: _mean_over_samples(r, c) * (_batch_size(c) / sum(_num_samples(r, c)))
            ),
            "accumulate.last": (
                lambda r, c: c.over_ranks(lambda r: _weighted(r, c)[-1]) / _batch_size(c)
            ),
            "accumulate.own_share": lambda r, c: _weighted(r, c).sum(0) / _batch_size(c),
            "accumulate.mean_of_rank_means": lambda r, c: (
                c.over_ranks(partial(_own_mean, case=c)) / c.world_size
            ),
        },
        sizes=(12, 1),
        world_sizes=world_sizes,
    )


def _one_all_reduce(rank: int, case: Case) -> Target:
    return Target(messages=2 * (case.world_size - 1))


def _num_samples(rank: int, case: Case) -> list[int]:
    least = case.integer(0, 1, 4)
    return [least + 3, least + 1, least + 2 * rank]


def _gradients(rank: int, case: Case) -> Tensor:
    """[3, N], by micro-batch."""
    return case.random(100 * rank + case.size, 3, case.size)


def _batch_size(case: Case) -> int:
    return sum(sum(_num_samples(rank, case)) for rank in range(case.world_size))


def _weighted(rank: int, case: Case) -> Tensor:
    """[3, N]: the gradient of the summed loss of each micro-batch."""
    return torch.tensor(_num_samples(rank, case)).unsqueeze(1) * _gradients(rank, case)


def _own_mean(rank: int, case: Case) -> Tensor:
    return _weighted(rank, case).sum(0) / sum(_num_samples(rank, case))


def _mean_over_samples(rank: int, case: Case) -> Tensor:
    return case.over_ranks(lambda r: _weighted(r, case).sum(0)) / _batch_size(case)
