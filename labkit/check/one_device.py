"""Checks of loss scaling over ranks, and of top-k with error feedback.

Symbols: P ranks, N elements of a gradient, k of them sent.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from labkit import collectives
from labkit.check.grading import WORLD_SIZES, Case, Target, Verdict, returns

LR, SCALE, KEPT = 0.5, 1024.0, 2


def _one_all_reduce(rank: int, case: Case) -> Target:
    return Target(messages=2 * (case.world_size - 1))


def loss_scaling(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, weight, gradient, scale, lr)``: one update with loss scaling.

    ``gradient`` [N] is this rank's part of ``scale`` times the gradient of the mean loss; it may
    have overflowed on some rank. Expected is [new weight, new scale]: weight - lr x the gradient
    of the mean loss and the same scale, or, if the sum over the ranks is not finite, the same
    weight and half the scale. Target: 2 (P - 1) messages.
    """
    return returns(
        fn,
        _scaled_update,
        name="one_device.loss_scaling",
        inputs=lambda rank, case: (_weight(case), _scaled_gradient(rank, case), SCALE, LR),
        signature="comm, weight, gradient, scale, lr",
        target=_one_all_reduce,
        mistakes={
            "scaling.still_scaled": partial(_taken, 1.0),
            "scaling.over_ranks": lambda r, c: _taken(1 / SCALE / c.world_size, r, c),
            "scaling.update_anyway": partial(_taken, 1 / SCALE),
            "scaling.lowered_and_updated": partial(_lowered_anyway, True),
            "scaling.lowered_for_nothing": partial(_lowered_anyway, False),
            "scaling.patched": _patched,
            "scaling.not_lowered": partial(_scaled_update, after=SCALE),
            "scaling.ranks_disagree": partial(_scaled_update, of=_scaled_gradient),
            "scaling.own_gradient": lambda r, c: [_updated(c, _scaled_gradient(r, c)), SCALE],
        },
        sizes=(8, 5),
        case_words={5: "of which the last rank's gradient has overflowed"},
        world_sizes=world_sizes,
    )


def _scaled_gradient(rank: int, case: Case) -> Tensor:
    gradient = SCALE * case.tensor(rank)
    if case.size == 5 and rank == case.world_size - 1:
        gradient[1] = torch.inf
    return gradient


def _weight(case: Case) -> Tensor:
    return torch.arange(1.0, case.size + 1)


def _total(rank: int, case: Case) -> Tensor:
    return case.over_ranks(lambda rank: _scaled_gradient(rank, case))


def _updated(case: Case, gradient: Tensor, factor: float = 1 / SCALE) -> Tensor:
    """The weight after an update with ``factor`` times the gradient, whatever is in it."""
    return _weight(case) - LR * factor * gradient


def _taken(factor: float, rank: int, case: Case) -> list:
    return [_updated(case, _total(rank, case), factor), SCALE]


def _lowered_anyway(overflowed: bool, rank: int, case: Case) -> list:
    """The update with half the scale for sums that have overflowed, or have not; else []."""
    if overflowed == bool(_total(rank, case).isfinite().all()):
        return []
    return [_updated(case, _total(rank, case)), SCALE / 2]


def _patched(rank: int, case: Case) -> list:
    finite = _total(rank, case).isfinite()
    patched = torch.where(finite, _updated(case, _total(rank, case)), _weight(case))
    return [patched, SCALE if finite.all() else SCALE / 2]


def _scaled_update(rank: int, case: Case, after: float = SCALE / 2, of: Callable = _total) -> list:
    """The update, or the same weight and the scale ``after`` an overflow of ``of(rank, case)``."""
    if of(rank, case).isfinite().all():
        return _taken(1 / SCALE, rank, case)
    return [_weight(case), after]


def top_k(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradient, residual, k)``: a sparse all-reduce with error feedback.

    Each rank sends the k elements of gradient + residual that are largest in magnitude. Expected
    is [sum over the ranks of what they send, this rank's new residual], both [N]. Target per rank:
    (P - 1) k values (float32) and as many indices (int64), 12 (P - 1) k bytes.
    """
    return returns(
        fn,
        lambda rank, case: [_sparse_sum(case), _kept(rank, case)],
        name="one_device.top_k",
        inputs=lambda rank, case: (case.tensor(rank), _residual(rank, case), KEPT),
        signature="comm, gradient, residual, k",
        target=lambda rank, case: Target(num_bytes=12 * KEPT * (case.world_size - 1)),
        mistakes={
            "top_k.lost": lambda r, c: [_sparse_sum(c), torch.zeros(c.size)],
            "top_k.forgot_residual": _without_residual,
            "top_k.sent_and_kept": lambda r, c: [_sparse_sum(c), _with_memory(r, c)],
            "top_k.kept_the_sent": lambda r, c: [_sparse_sum(c), _sent(r, c)],
            "top_k.not_by_magnitude": _not_by_magnitude,
            "top_k.last_wins": lambda r, c: [_overwritten(c), _kept(r, c)],
            "top_k.own_alone": lambda r, c: [_sent(r, c), _kept(r, c)],
            "top_k.mean": lambda r, c: [_sparse_sum(c) / c.world_size, _kept(r, c)],
        },
        sizes=(12, 7),
        may_call=frozenset(vars(collectives)) - {"sparse_all_reduce"},
        world_sizes=world_sizes,
    )


def _residual(rank: int, case: Case) -> Tensor:
    return case.random(rank + 7, case.size)


def _with_memory(rank: int, case: Case) -> Tensor:
    return case.tensor(rank) + _residual(rank, case)


def _largest(values: Tensor, by: Callable[[Tensor], Tensor] = torch.abs) -> Tensor:
    """``values`` [N] with all but the k largest in magnitude (or ``by`` another key) set to 0."""
    places = by(values).topk(KEPT).indices
    return torch.zeros_like(values).index_copy(0, places, values[places])


def _sent(rank: int, case: Case) -> Tensor:
    return _largest(_with_memory(rank, case))


def _kept(rank: int, case: Case) -> Tensor:
    return _with_memory(rank, case) - _sent(rank, case)


def _sparse_sum(case: Case) -> Tensor:
    return case.over_ranks(lambda rank: _sent(rank, case))


def _not_by_magnitude(rank: int, case: Case) -> list:
    sent = [_largest(_with_memory(r, case), torch.clone) for r in range(case.world_size)]
    return [sum(sent), _with_memory(rank, case) - sent[rank]]


def _without_residual(rank: int, case: Case) -> list:
    sent = [_largest(case.tensor(r)) for r in range(case.world_size)]
    return [sum(sent), case.tensor(rank) - sent[rank]]


def _overwritten(case: Case) -> Tensor:
    total = torch.zeros(case.size)
    for rank in range(case.world_size):
        total = torch.where(_sent(rank, case) != 0, _sent(rank, case), total)
    return total
