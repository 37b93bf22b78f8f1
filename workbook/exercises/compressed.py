"""Page 07: all-reduce in fewer bytes.

Symbols: P ranks, N elements of a gradient, k of them sent.
"""

import torch
from torch import Tensor

from labkit.collectives.compressed import HalfRing
from workbook.exercises.grader import Case, Check, Target
from workbook.exercises.grader.exercise import Found
from workbook.exercises.grader.judge_values import in_words, made_of
from workbook.exercises.ring import ring_target


def _near_the_sum(case: Case, values: list[Tensor]) -> Found:
    total = case.total()
    bound = 0.01 * max([1.0, *total.abs().flatten().tolist()])
    for rank, value in enumerate(values):
        error = (value - total).abs().max().item() if value.numel() else 0.0
        if not error <= bound:
            text = f"rank {rank} is off by {error:.2g}, and may be off by {bound:.2g}"
            factors = made_of(value, {f"rank {r}": case.tensor(r) for r in range(case.world_size)})
            if factors:
                text += f", expected the sum, it holds {in_words(factors)}"
            return text
        if not torch.equal(value, values[0]):
            return (
                f"ranks 0 and {rank} do not hold the same bits: what a rank keeps must be "
                "rounded as what it sends"
            )
    return None


# The sum may be off by 1% of its largest element, and has the same bits on every rank.
half_the_bytes = Check(
    "compressed.half_the_bytes",
    judge=_near_the_sum,
    target=lambda rank, case: ring_target(case.size, 2, rank, case),
    library=HalfRing("fp16"),
)


_SPARSE = 7
# Rank r's residual is drawn with the key r + 7, its gradient with another one.
_RESIDUAL_KEY = 7


def _gradient(rank: int, case: Case) -> Tensor:
    return _thinned(case.tensor(rank))


def _residual(rank: int, case: Case) -> Tensor:
    return _thinned(case.random(rank + _RESIDUAL_KEY, case.size))


def _thinned(values: Tensor) -> Tensor:
    """Leave fewer than k elements other than 0 in the smaller case: the k-th has equals."""
    return values * (torch.arange(len(values)) < 1) if len(values) == _SPARSE else values


def _corrected(rank: int, case: Case) -> Tensor:
    """The gradient with the residual of the step before."""
    return _gradient(rank, case) + _residual(rank, case)


def _k(case: Case) -> int:
    return case.integer(0, 2 if case.size == _SPARSE else 1, 3)


def _sent(rank: int, case: Case) -> Tensor:
    """The corrected gradient [N] with all but the k elements of largest magnitude set to 0."""
    values = _corrected(rank, case)
    places = values.abs().topk(_k(case)).indices
    return torch.zeros_like(values).index_copy(0, places, values[places])


def _parts(case: Case) -> dict[str, Tensor]:
    ranks = range(case.world_size)
    parts = {f"what rank {rank} sends": _sent(rank, case) for rank in ranks}
    return parts | {f"rank {rank}'s gradient + residual": _corrected(rank, case) for rank in ranks}


# Returned are the sum of what all ranks send, and this rank's new residual, both [N].
top_k = Check(
    "compressed.top_k",
    lambda rank, case: [
        case.over_ranks(lambda r: _sent(r, case)),
        _corrected(rank, case) - _sent(rank, case),
    ],
    inputs=lambda rank, case: (_gradient(rank, case), _residual(rank, case), _k(case)),
    signature="comm, gradient, residual, k",
    written=None,
    keeps=("gradient", "residual"),
    # Each of the k elements travels as a float32 and an int64.
    target=lambda rank, case: Target(num_bytes=12 * _k(case) * (case.world_size - 1)),
    mistakes={
        "the new residual is what was not sent": lambda rank, case: [
            case.over_ranks(lambda r: _sent(r, case)),
            _sent(rank, case),
        ],
    },
    parts=_parts,
    sizes=(12, _SPARSE),
)
