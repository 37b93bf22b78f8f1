"""Checks of page 01: what a rank may do alone, and what it must not decide alone.

Symbols: P ranks, N elements of a gradient, k of them sent.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from labkit.check.grading.core import WORLD_SIZES, grade
from labkit.check.grading.exercise import Case, Exercise, Target
from labkit.check.grading.report import Verdict

LR, SCALE, KEPT = 0.5, 1024.0, 2


def accumulate(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradients, num_samples, batch_size)``: accumulate, then all-reduce once.

    ``gradients`` are the means [N] over this rank's micro-batches of ``num_samples`` samples each;
    due is the mean over all ``batch_size`` samples of all ranks. Target: 2 (P - 1) messages.
    """
    exercise = Exercise(
        "one_device.accumulate",
        _mean_over_samples,
        _micro_batches,
        "comm, gradients, num_samples, batch_size",
        written=None,
        target=lambda rank, case: Target(messages=2 * (case.world_size - 1)),
        mistakes={
            "micro-batches of different sizes count alike: it is the mean of their means": (
                lambda rank, case: (
                    _over(case, lambda r: sum(_gradients(r, case)) / 9) * (3 / case.world_size)
                )
            ),
            "the sum over the samples: it is not divided by batch_size": (
                lambda rank, case: _mean_over_samples(rank, case) * _batch_size(case)
            ),
            "divided by this rank's own samples, where those of all ranks are due": (
                lambda rank, case: (
                    _mean_over_samples(rank, case) * (_batch_size(case) / sum(_num_samples(rank)))
                )
            ),
            "only the last micro-batch is in it: each one overwrites what was there": (
                lambda rank, case: (
                    _over(case, lambda r: _weighted(r, case)[-1]) / _batch_size(case)
                )
            ),
            "this rank's share alone: nothing of the other ranks is in it": (
                lambda rank, case: sum(_weighted(rank, case)) / _batch_size(case)
            ),
            "every rank counts alike: it is the mean of the ranks' means": (
                lambda rank, case: (
                    _over(case, lambda r: sum(_weighted(r, case)) / sum(_num_samples(r)))
                    / case.world_size
                )
            ),
        },
        sizes=(12, 1),
    )
    return grade(fn, exercise, world_sizes)


def _num_samples(rank: int) -> list[int]:
    return [4, 2, 1 + 2 * rank]


def _gradients(rank: int, case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + case.size)
    return list(torch.randn(3, case.size, generator=generator))


def _batch_size(case: Case) -> int:
    return sum(sum(_num_samples(rank)) for rank in range(case.world_size))


def _micro_batches(rank: int, case: Case) -> tuple:
    return _gradients(rank, case), _num_samples(rank), _batch_size(case)


def _weighted(rank: int, case: Case) -> list[Tensor]:
    return [n * gradient for n, gradient in zip(_num_samples(rank), _gradients(rank, case))]


def _over(case: Case, of_rank: Callable[[int], Tensor]) -> Tensor:
    return sum(of_rank(rank) for rank in range(case.world_size))


def _mean_over_samples(rank: int, case: Case) -> Tensor:
    return _over(case, lambda r: sum(_weighted(r, case))) / _batch_size(case)


def loss_scaling(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, weight, gradient, scale, lr)``: one update with loss scaling.

    ``gradient`` [N] is this rank's part of ``scale`` times the gradient of the mean loss; it may
    have overflowed on some rank. Due is [new weight, new scale]: weight - lr x gradient and the
    same scale, or, where the sum is not finite, the same weight and half the scale. Target:
    2 (P - 1) messages.
    """
    exercise = Exercise(
        "one_device.loss_scaling",
        partial(_scaled_update, _lowered),
        _scaled_inputs,
        "comm, weight, gradient, scale, lr",
        written=None,
        target=lambda rank, case: Target(messages=2 * (case.world_size - 1)),
        mistakes={
            "the gradient is still multiplied by the scale": partial(_taken, 1.0),
            "divided by the ranks, too: the parts already add up to the gradient of the mean": (
                lambda rank, case: _taken(1 / SCALE / case.world_size, rank, case)
            ),
            "the update was made although the sum had overflowed": partial(_taken, 1 / SCALE),
            "the scale was lowered, and yet the update was made with what had overflowed": (
                lambda rank, case: _lowered_anyway(rank, case, overflowed=True)
            ),
            "the scale was lowered although nothing had overflowed": (
                lambda rank, case: _lowered_anyway(rank, case, overflowed=False)
            ),
            "only the numbers that had overflowed were left out: the whole update has to be": (
                _patched
            ),
            "the update was left out, but the scale not lowered: the next will overflow, too": (
                partial(_scaled_update, lambda scale: scale)
            ),
            "ranks disagree: each looked at its own gradient, not at the sum": _alone_decided,
            "this rank's own gradient alone": partial(_own_taken),
        },
        # With five numbers the last rank's gradient has overflowed.
        sizes=(8, 5),
    )
    return grade(fn, exercise, world_sizes)


def _lowered(scale: float) -> float:
    return scale / 2


def _scaled_gradient(rank: int, case: Case) -> Tensor:
    gradient = SCALE * case.tensor(rank)
    if case.size == 5 and rank == case.world_size - 1:
        gradient[1] = torch.inf
    return gradient


def _weight(case: Case) -> Tensor:
    return torch.arange(1.0, case.size + 1)


def _scaled_inputs(rank: int, case: Case) -> tuple:
    return _weight(case), _scaled_gradient(rank, case), SCALE, LR


def _total(case: Case) -> Tensor:
    return _over(case, lambda rank: _scaled_gradient(rank, case))


def _taken(factor: float, rank: int, case: Case) -> list:
    """An update with ``factor`` times the sum, whatever is in it."""
    return [_weight(case) - LR * factor * _total(case), SCALE]


def _lowered_anyway(rank: int, case: Case, *, overflowed: bool) -> list:
    """The update and half the scale, where the sum has overflowed or where not; else nothing."""
    if overflowed == bool(_total(case).isfinite().all()):
        return []
    return [_taken(1 / SCALE, rank, case)[0], SCALE / 2]


def _patched(rank: int, case: Case) -> list:
    updated = _taken(1 / SCALE, rank, case)[0]
    finite = _total(case).isfinite()
    return [torch.where(finite, updated, _weight(case)), SCALE if finite.all() else SCALE / 2]


def _own_taken(rank: int, case: Case) -> list:
    return [_weight(case) - LR / SCALE * _scaled_gradient(rank, case), SCALE]


def _scaled_update(after_overflow: Callable[[float], float], rank: int, case: Case) -> list:
    if _total(case).isfinite().all():
        return _taken(1 / SCALE, rank, case)
    return [_weight(case), after_overflow(SCALE)]


def _alone_decided(rank: int, case: Case) -> list:
    if _scaled_gradient(rank, case).isfinite().all():
        return _taken(1 / SCALE, rank, case)
    return [_weight(case), SCALE / 2]


def top_k(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradient, residual, k)``: a sparse all-reduce with error feedback.

    Due is [sum over the ranks of the k elements of gradient + residual that each holds largest in
    magnitude, this rank's new residual], both [N]. Target: (P - 1) k values (float32) and as many
    places (int64), 12 (P - 1) k bytes.
    """
    exercise = Exercise(
        "one_device.top_k",
        partial(_sparse, _sent),
        _sparse_inputs,
        "comm, gradient, residual, k",
        written=None,
        target=lambda rank, case: Target(num_bytes=12 * KEPT * (case.world_size - 1)),
        mistakes={
            "what is not sent is lost: the new residual is zero": (
                lambda rank, case: [_sparse_sum(_sent, case), torch.zeros(case.size)]
            ),
            "the old residual was not added to the gradient": partial(_sparse, _sent_forgetful),
            "what was sent is in the residual, too: it will be sent again": (
                lambda rank, case: [_sparse_sum(_sent, case), _with_memory(rank, case)]
            ),
            "the new residual is what was sent, where what was not sent is due": (
                lambda rank, case: [_sparse_sum(_sent, case), _sent(rank, case)]
            ),
            "the k largest numbers were taken, not those largest in magnitude": (
                partial(_sparse, _sent_largest)
            ),
            "where two ranks send the same place, the last one wins: add them up": (
                lambda rank, case: [_overwritten(case), _sparse(_sent, rank, case)[1]]
            ),
            "this rank's own elements alone": (
                lambda rank, case: [_sent(rank, case), _sparse(_sent, rank, case)[1]]
            ),
            "divided by the number of ranks: it is the mean, where the sum is due": (
                lambda rank, case: [
                    _sparse_sum(_sent, case) / case.world_size,
                    _sparse(_sent, rank, case)[1],
                ]
            ),
        },
        sizes=(12, 7),
    )
    return grade(fn, exercise, world_sizes)


def _residual(rank: int, case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 7)
    return torch.randn(case.size, generator=generator)


def _with_memory(rank: int, case: Case) -> Tensor:
    return case.tensor(rank) + _residual(rank, case)


def _sparse_inputs(rank: int, case: Case) -> tuple:
    return case.tensor(rank), _residual(rank, case), KEPT


def _only(values: Tensor, places: Tensor) -> Tensor:
    """``values`` [N] at ``places`` [k], zero elsewhere."""
    return torch.zeros_like(values).index_copy(0, places, values[places])


def _sent(rank: int, case: Case) -> Tensor:
    values = _with_memory(rank, case)
    return _only(values, values.abs().topk(KEPT).indices)


def _sent_largest(rank: int, case: Case) -> Tensor:
    values = _with_memory(rank, case)
    return _only(values, values.topk(KEPT).indices)


def _sent_forgetful(rank: int, case: Case) -> Tensor:
    values = case.tensor(rank)
    return _only(values, values.abs().topk(KEPT).indices)


def _sparse_sum(sent: Callable[[int, Case], Tensor], case: Case) -> Tensor:
    return _over(case, lambda rank: sent(rank, case))


def _overwritten(case: Case) -> Tensor:
    total = torch.zeros(case.size)
    for rank in range(case.world_size):
        total = torch.where(_sent(rank, case) != 0, _sent(rank, case), total)
    return total


def _sparse(sent: Callable[[int, Case], Tensor], rank: int, case: Case) -> list:
    begun = case.tensor(rank) if sent is _sent_forgetful else _with_memory(rank, case)
    return [_sparse_sum(sent, case), begun - sent(rank, case)]
