"""Checks of page 07: all-reduce in fewer bytes.

Symbols: P ranks, S bytes, N elements of a gradient, k of them sent.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from labkit import collectives
from labkit.collectives.compressed import HalfRing
from workbook.exercises.grader import (
    WORLD_SIZES,
    Case,
    Exercise,
    Mistake,
    Target,
    Verdict,
    grade,
    returns,
)
from workbook.exercises.grader.exercise import DRAWN
from workbook.exercises.ring import ring_target

KEPT = 2


def half_the_bytes(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: a ring whose messages are 16-bit floats, in place.

    The sum may be off by 1% of its largest element, and has the same bits on every rank. Target
    per rank: 2 (P - 1) messages, (P - 1) / P x S bytes.
    """
    exercise = Exercise(
        "compressed.half_the_bytes",
        judge=_near_the_sum,
        target=lambda rank, case: ring_target(case.size, 2, rank, case),
        any_chunks=True,
        library=HalfRing("fp16"),
        drawn_size=DRAWN,
        may_call=frozenset({"share_only"}),
    )
    return grade(fn, exercise, world_sizes)


def _near_the_sum(case: Case, values: list[Tensor]) -> Mistake | None:
    total = case.total()
    bound = 0.01 * max([1.0, *total.abs().flatten().tolist()])
    for rank, value in enumerate(values):
        if value.numel() and (error := (value - total).abs().max().item()) > bound:
            return Mistake(
                "half.too_far",
                _like(case, rank, value, bound),
                rank=rank,
                error=error,
                bound=bound,
            )
    differing = [rank for rank, value in enumerate(values) if not torch.equal(value, values[0])]
    return Mistake("half.ranks_differ", rank=differing[0]) if differing else None


def _like(case: Case, rank: int, value: Tensor, bound: float) -> Mistake | None:
    looks = {
        "half.unchanged": case.tensor(rank),
        "half.mean": case.total() / case.world_size,
    }
    near = (key for key, wrong in looks.items() if (value - wrong).abs().max() <= bound)
    found = next(near, None)
    return Mistake(found) if found else None


def top_k(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradient, residual, k)``: a sparse all-reduce with error feedback.

    Each rank sends the k elements of gradient + residual that are largest in magnitude. Expected
    is [sum over the ranks of what they send, this rank's new residual], both [N]. Target per rank:
    (P - 1) k values (float32) and as many indices (int64), 12 (P - 1) k bytes.
    """
    return returns(
        fn,
        lambda rank, case: [_sparse_sum(case), _kept(rank, case)],
        name="compressed.top_k",
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
        may_call=frozenset(dir(collectives)) - {"sparse_all_reduce"},
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
