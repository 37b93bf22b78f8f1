"""Page 07: all-reduce in fewer bytes.

Symbols: P ranks, S bytes, N elements of a gradient, k of them sent.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from labkit import collectives
from labkit.collectives.compressed import HalfRing
from workbook.exercises.grader import WORLD_SIZES, Case, Exercise, Target, Verdict, grade, returns
from workbook.exercises.grader.exercise import DRAWN, Found
from workbook.exercises.ring import ring_target

_K = 2


def half_the_bytes(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: a ring whose messages are 16-bit floats, in place.

    The sum may be off by 1% of its largest element, and has the same bits on every rank. Target
    per rank: 2 (P - 1) messages, (P - 1) / P x S bytes.
    """

    def near_the_sum(case: Case, values: list[Tensor]) -> Found:
        total = case.total()
        bound = 0.01 * max([1.0, *total.abs().flatten().tolist()])
        for rank, value in enumerate(values):
            error = (value - total).abs().max().item() if value.numel() else 0.0
            if not error <= bound:
                return f"rank {rank} is off by {error:.2g}, and may be off by {bound:.2g}"
        for rank, value in enumerate(values):
            if not torch.equal(value, values[0]):
                why = "what a rank keeps must be rounded as what it sends"
                return f"ranks 0 and {rank} do not hold the same bits: {why}"
        return None

    exercise = Exercise(
        "compressed.half_the_bytes",
        judge=near_the_sum,
        target=lambda rank, case: ring_target(case.size, 2, rank, case),
        library=HalfRing("fp16"),
        drawn_size=DRAWN,
        may_call=frozenset({"share_only"}),
    )
    return grade(fn, exercise, world_sizes)


def top_k(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradient, residual, k)``: a sparse all-reduce with error feedback.

    Each rank sends the k elements of gradient + residual that are largest in magnitude. Expected
    is [sum over the ranks of what they send, this rank's new residual], both [N]. Target per rank:
    (P - 1) k values (float32) and as many indices (int64), 12 (P - 1) k bytes.
    """

    def residual(rank: int, case: Case) -> Tensor:
        return case.random(rank + 7, case.size)

    def whole(rank: int, case: Case) -> Tensor:
        return case.tensor(rank) + residual(rank, case)

    def largest(values: Tensor) -> Tensor:
        """``values`` [N] with all but the k largest in magnitude set to 0."""
        places = values.abs().topk(_K).indices
        return torch.zeros_like(values).index_copy(0, places, values[places])

    def sent(rank: int, case: Case) -> Tensor:
        return largest(whole(rank, case))

    def total(case: Case) -> Tensor:
        return case.over_ranks(lambda rank: sent(rank, case))

    def forgetful(rank: int, case: Case) -> list[Tensor]:
        all_sent = [largest(case.tensor(r)) for r in range(case.world_size)]
        return [torch.stack(all_sent).sum(0), case.tensor(rank) - all_sent[rank]]

    return returns(
        fn,
        lambda rank, case: [total(case), whole(rank, case) - sent(rank, case)],
        name="compressed.top_k",
        inputs=lambda rank, case: (case.tensor(rank), residual(rank, case), _K),
        signature="comm, gradient, residual, k",
        target=lambda rank, case: Target(num_bytes=12 * _K * (case.world_size - 1)),
        mistakes={
            "the old residual was not added to the gradient": forgetful,
            "the elements that were not sent are lost: the new residual is zero": (
                lambda rank, case: [total(case), torch.zeros(case.size)]
            ),
            "the elements that were sent are still in the residual, and will be sent again": (
                lambda rank, case: [total(case), whole(rank, case)]
            ),
        },
        parts=lambda case: {
            f"what rank {r} sends": [sent(r, case)] for r in range(case.world_size)
        },
        sizes=(12, 7),
        may_call=frozenset(dir(collectives)) - {"sparse_all_reduce"},
        world_sizes=world_sizes,
    )
