"""Page 06: naive all-reduce, the ring and its halves, and a mean that is built on it.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from labkit import collectives
from labkit.collectives.ring import split_chunks
from labkit.costs.traffic import (
    Cost,
    naive_all_reduce_cost,
    ring_all_reduce_cost,
    share_only_cost,
    share_reduce_cost,
)
from labkit.schedules.ring import owned_chunk
from workbook.exercises.grader import Case, Check, Target
from workbook.exercises.grader.exercise import DRAWN, SIZES, same_bits


def ring_target(num_elements: int, element_bytes: int, rank: int, case: Case) -> Target:
    """The messages and bytes of the whole ring, with chunks of equal, padded size."""
    padded = -(-num_elements // case.world_size) * case.world_size
    cost = ring_all_reduce_cost(padded, element_bytes, case.world_size, rank)
    return Target(cost.messages, cost.num_bytes)


def _target(cost_of: Callable[..., Cost], rank: int, case: Case) -> Target:
    return case.target(cost_of, rank, peers={(rank + 1) % case.world_size})


def _through_rank_0(rank: int, case: Case) -> Target:
    peers = {0} if rank else range(1, case.world_size)
    return case.target(naive_all_reduce_cost, rank, peers=peers)


# fn(comm, tensor): the sum over the ranks in place; all send to rank 0, which sends it back.
naive_all_reduce = Check(
    "ring.naive_all_reduce",
    lambda rank, case: case.total(),
    target=_through_rank_0,
    mistakes={
        "rank 0 sends a sum before all tensors are in it": lambda rank, case: case.total(
            range(rank + 1) if rank else None
        ),
    },
    library=collectives.naive_all_reduce,
)
# fn(comm, tensor): the sum over the ranks in place, by whole tensors in a ring. Bits may differ.
rotate_and_add = Check(
    "ring.rotate_and_add",
    lambda rank, case: case.total(),
    # Each of the P - 1 messages is the whole tensor.
    target=partial(_target, lambda n, size, P, rank: Cost(P - 1, P - 1, (P - 1) * n * size)),
    library=collectives.ring_all_reduce,
)


def _sums(case: Case) -> list[Tensor]:
    return split_chunks(case.total(), case.world_size)


def _owned_sum(rank: int, case: Case) -> list[Tensor | None]:
    owned = owned_chunk(rank, case.world_size)
    return [chunk if index == owned else None for index, chunk in enumerate(_sums(case))]


def _one_complete(rank: int, case: Case) -> tuple[list[Tensor]]:
    chunks = split_chunks(case.tensor(rank), case.world_size)
    owned = owned_chunk(rank, case.world_size)
    chunks[owned].copy_(_sums(case)[owned])
    return (chunks,)


_in_chunks = partial(Check, signature="comm, chunks", chunked=True)
# fn(comm, chunks), in place: chunk (rank + 1) mod P becomes the sum (reduce-scatter).
share_reduce = _in_chunks(
    "ring.share_reduce",
    _owned_sum,
    inputs=lambda rank, case: (split_chunks(case.tensor(rank), case.world_size),),
    target=partial(_target, share_reduce_cost),
    library=collectives.share_reduce,
)
# fn(comm, chunks), the second half (all-gather): only chunk (rank + 1) mod P is complete.
share_only = _in_chunks(
    "ring.share_only",
    lambda rank, case: _sums(case),
    inputs=_one_complete,
    target=partial(_target, share_only_cost),
    library=collectives.share_only,
)

# One case of ``all_reduce`` is a matrix of this shape, with fewer rows than ranks.
_MATRIX = (3, 36)
_MATRIX_SIZE = 3 * 36


def _in_shape(flat: Tensor) -> Tensor:
    if flat.shape == (_MATRIX_SIZE,):
        return flat.view(_MATRIX)
    return flat


def _padded_target(rank: int, case: Case) -> Target:
    exact = _target(ring_all_reduce_cost, rank, case)
    return exact._replace(num_bytes=ring_target(case.size, 4, rank, case).num_bytes)


# Where P does not divide the number of elements, a chunk may be padded, or longer than others.
all_reduce = Check(
    "ring.all_reduce",
    lambda rank, case: _in_shape(case.total()),
    inputs=lambda rank, case: (_in_shape(case.tensor(rank)),),
    chunked=True,
    target=_padded_target,
    rule=same_bits,
    library=collectives.ring_all_reduce,
    sizes=(*SIZES, _MATRIX_SIZE),
    special=lambda case: f"a matrix {[*_MATRIX]}" if case.size == _MATRIX_SIZE else "",
)


def _samples(rank: int, case: Case) -> int:
    if rank == case.world_size - 1:
        return 0
    return case.integer(rank, 2, 9) + 8 * (rank % 2)


def _mean(rank: int, case: Case) -> Tensor:
    count = sum(_samples(r, case) for r in range(case.world_size))
    return case.over_ranks(lambda r: _samples(r, case) * case.tensor(r)) / count


# ``gradient`` [N] is the mean over this rank's samples; the last rank has none.
weighted_mean = Check(
    "ring.weighted_mean",
    _mean,
    signature="comm, gradient, num_samples",
    inputs=lambda rank, case: (case.tensor(rank), _samples(rank, case)),
    written=None,
    keeps=("gradient",),
    target=lambda rank, case: Target(messages=2 * (case.world_size - 1)),
    sizes=(7, 1),
    drawn_size=DRAWN,
)
