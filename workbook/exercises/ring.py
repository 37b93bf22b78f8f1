"""Page 06: ring all-reduce, its halves, and a mean that is built on it.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from labkit import collectives
from labkit.collectives.ring import split_chunks
from labkit.costs.traffic import Cost, ring_all_reduce_cost, share_only_cost, share_reduce_cost
from labkit.schedules.ring import owned_chunk
from workbook.exercises.grader import WORLD_SIZES, Case, Exercise, Target, Verdict, grade, returns
from workbook.exercises.grader.exercise import DRAWN, SIZES, same_bits

# One case of ``all_reduce`` is a matrix of this shape; it may be cut by rows as well.
_MATRIX = (12, 9)
_MATRIX_SIZE = 12 * 9


def rotate_and_add(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: the sum over the ranks in place, by whole tensors in a ring.

    Target per rank: P - 1 messages of S bytes, in P - 1 exchanges, to one neighbour. The ranks add
    in different orders, so their results may differ in the last bits.
    """

    def cost(num_elements: int, element_bytes: int, world_size: int, rank: int) -> Cost:
        steps = world_size - 1
        return Cost(steps, steps, steps * num_elements * element_bytes)

    exercise = Exercise(
        "ring.rotate_and_add",
        expected=lambda rank, case: case.total(),
        target=partial(_target, cost),
        library=collectives.ring_all_reduce,
        drawn_size=DRAWN,
    )
    return grade(fn, exercise, world_sizes)


def share_reduce(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, chunks)``, the first half of the ring: share-reduce (reduce-scatter).

    At the end chunk (rank + 1) mod P holds the sum over the ranks, written in place. Target per
    rank: P - 1 messages of one chunk each, in P - 1 exchanges, all to its right neighbour.
    """

    def owned_sum(rank: int, case: Case) -> list:
        owned, sums = owned_chunk(rank, case.world_size), _sums(case)
        return [chunk if index == owned else None for index, chunk in enumerate(sums)]

    exercise = Exercise(
        "ring.share_reduce",
        signature="comm, chunks",
        inputs=lambda rank, case: (split_chunks(case.tensor(rank), case.world_size),),
        expected=owned_sum,
        chunked=True,
        target=partial(_target, share_reduce_cost),
        library=collectives.share_reduce,
        drawn_size=DRAWN,
    )
    return grade(fn, exercise, world_sizes)


def share_only(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, chunks)``, the second half of the ring: share-only (all-gather).

    It starts where share-reduce ends: chunk (rank + 1) mod P is complete, the others hold the
    rank's own values. At the end all chunks are complete. Target per rank: P - 1 messages of one
    chunk each, in P - 1 exchanges, all to its right neighbour.
    """

    def one_complete(rank: int, case: Case) -> tuple:
        chunks = split_chunks(case.tensor(rank), case.world_size)
        owned = owned_chunk(rank, case.world_size)
        chunks[owned].copy_(_sums(case)[owned])
        return (chunks,)

    exercise = Exercise(
        "ring.share_only",
        signature="comm, chunks",
        inputs=one_complete,
        expected=lambda rank, case: _sums(case),
        chunked=True,
        target=partial(_target, share_only_cost),
        library=collectives.share_only,
        drawn_size=DRAWN,
    )
    return grade(fn, exercise, world_sizes)


def all_reduce(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: the sum over the ranks, in place.

    Target per rank: 2 (P - 1) messages of one chunk each, 2 (P - 1) / P x S bytes in all, in
    2 (P - 1) exchanges, all to one neighbour. Where P does not divide the number of elements, a
    chunk may be padded, or longer than others. The results must be equal to the bit. One of the
    tensors is a matrix.
    """

    def in_shape(flat: Tensor) -> Tensor:
        return flat.view(_MATRIX) if flat.shape == (_MATRIX_SIZE,) else flat

    def target(rank: int, case: Case) -> Target:
        exact = _target(ring_all_reduce_cost, rank, case)
        return exact._replace(num_bytes=ring_target(case.size, 4, rank, case).num_bytes)

    exercise = Exercise(
        "ring.all_reduce",
        inputs=lambda rank, case: (in_shape(case.tensor(rank)),),
        expected=lambda rank, case: in_shape(case.total()),
        chunked=True,
        target=target,
        rule=same_bits,
        library=collectives.ring_all_reduce,
        drawn_size=DRAWN,
        may_call=frozenset({"share_reduce", "share_only"}),
        sizes=(*SIZES, _MATRIX_SIZE),
        special=lambda case: f"a matrix {[*_MATRIX]}" if case.size == _MATRIX_SIZE else "",
    )
    return grade(fn, exercise, world_sizes)


def weighted_mean(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradient, num_samples)``: the mean over the samples of all ranks.

    ``gradient`` [N] is the mean over this rank's samples; the last rank has none. Target: one
    ``ring_all_reduce``, 2 (P - 1) messages.
    """

    def samples(rank: int, case: Case) -> int:
        return case.integer(rank, 2, 9) + 8 * (rank % 2) if rank < case.world_size - 1 else 0

    def over_samples(case: Case) -> Tensor:
        return case.over_ranks(lambda rank: samples(rank, case) * case.tensor(rank))

    def mean(rank: int, case: Case) -> Tensor:
        return over_samples(case) / sum(samples(rank, case) for rank in range(case.world_size))

    return returns(
        fn,
        mean,
        name="ring.weighted_mean",
        signature="comm, gradient, num_samples",
        inputs=lambda rank, case: (case.tensor(rank), samples(rank, case)),
        target=lambda rank, case: Target(messages=2 * (case.world_size - 1)),
        mistakes={
            "every rank has the same weight, although the numbers of samples differ": (
                lambda rank, case: case.total() / case.world_size
            ),
            "the sum over the samples was divided by the number of ranks, not of samples": (
                lambda rank, case: over_samples(case) / case.world_size
            ),
        },
        sizes=(7, 1),
        drawn_size=DRAWN,
        world_sizes=world_sizes,
    )


def ring_target(num_elements: int, element_bytes: int, rank: int, case: Case) -> Target:
    """The messages and bytes of the whole ring, with chunks of equal, padded size."""
    padded = -(-num_elements // case.world_size) * case.world_size
    cost = ring_all_reduce_cost(padded, element_bytes, case.world_size, rank)
    return Target(cost.messages, cost.num_bytes)


def _target(cost_of: Callable[..., Cost], rank: int, case: Case) -> Target:
    return case.target(cost_of, rank, peers={(rank + 1) % case.world_size})


def _sums(case: Case) -> list[Tensor]:
    return split_chunks(case.total(), case.world_size)
