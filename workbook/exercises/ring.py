"""Checks of ring all-reduce, its halves, and a mean that is built on it.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable
from functools import partial

import torch

from labkit import collectives
from labkit.collectives.ring import split_chunks
from labkit.costs.traffic import Cost, ring_all_reduce_cost, share_only_cost, share_reduce_cost
from labkit.schedules.ring import chunk_bounds, owned_chunk
from workbook.exercises.grader import WORLD_SIZES, Case, Exercise, Target, Verdict, grade, returns
from workbook.exercises.grader.exercise import DRAWN, SIZES

# The shape of one case of ``all_reduce``; it may be cut by rows as well.
MATRIX = (12, 9)


def rotate_and_add(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: the sum over the ranks in place, by whole tensors in a ring.

    Target per rank: P - 1 messages of S bytes, in P - 1 exchanges, all to its right neighbour.
    The ranks add in different orders, so their results may differ in the last bits.
    """
    exercise = Exercise(
        "ring.rotate_and_add",
        expected=partial(reduced, "sum"),
        target=partial(_target, _rotation_cost, "right"),
        library=collectives.ring_all_reduce,
        drawn_size=DRAWN,
    )
    return grade(fn, exercise, world_sizes)


def share_reduce(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, chunks)``, the first half of the ring: share-reduce (reduce-scatter).

    At the end chunk (rank + 1) mod P holds the sum over the ranks, written in place. Target per
    rank: P - 1 messages of one chunk each, in P - 1 exchanges, all to its right neighbour.
    """
    exercise = Exercise(
        "ring.share_reduce",
        signature="comm, chunks",
        inputs=_own_chunks,
        expected=_owned_sum,
        chunked=True,
        target=partial(_target, share_reduce_cost, "right"),
        library=collectives.share_reduce,
        drawn_size=DRAWN,
    )
    return grade(fn, exercise, world_sizes)


def share_only(
    fn: Callable, *, to: str = "right", world_sizes: tuple[int, ...] = WORLD_SIZES
) -> Verdict:
    """Grade ``fn(comm, chunks)``, the second half of the ring: share-only (all-gather).

    It starts where share-reduce ends: chunk (rank + 1) mod P is complete, the others hold the
    rank's own values. At the end all chunks are complete. Target per rank: P - 1 messages of one
    chunk each, in P - 1 exchanges, all to its right neighbour, or to its left with ``to="left"``.
    """
    exercise = Exercise(
        "ring.share_only",
        signature="comm, chunks",
        inputs=_one_complete_chunk,
        expected=_all_sums,
        chunked=True,
        target=partial(_target, share_only_cost if to == "right" else _leftward_cost, to),
        library=collectives.share_only if to == "right" else None,
        drawn_size=DRAWN,
    )
    return grade(fn, exercise, world_sizes)


def all_reduce(
    fn: Callable, *, op: str = "sum", world_sizes: tuple[int, ...] = WORLD_SIZES
) -> Verdict:
    """Grade ``fn(comm, tensor)``: the sum (or ``op="mean"``) over the ranks, in place.

    Target per rank: 2 (P - 1) messages of one chunk each, 2 (P - 1) / P x S bytes in all, in
    2 (P - 1) exchanges, all to its right neighbour. Where P does not divide the number of
    elements, a chunk may be padded, or longer than others. The results must be equal to the bit.
    One of the tensors is a matrix.
    """
    exercise = Exercise(
        "ring.all_reduce",
        inputs=_of_some_shape,
        expected=partial(_reduced_in_shape, op),
        chunked=True,
        target=_in_any_chunks,
        any_chunks=True,
        same_bits=True,
        library=collectives.ring_all_reduce,
        drawn_size=DRAWN,
        may_call=frozenset({"share_reduce", "share_only"}),
        sizes=(*SIZES, torch.Size(MATRIX).numel()),
        case_words={torch.Size(MATRIX).numel(): f"in a tensor of shape {[*MATRIX]}"},
    )
    return grade(fn, exercise, world_sizes)


def weighted_mean(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradient, num_samples)``: the mean over the samples of all ranks.

    ``gradient`` [N] is the mean over this rank's samples; the last rank has none. Target: one
    ``ring_all_reduce``, 2 (P - 1) messages.
    """
    return returns(
        fn,
        _mean_over_samples,
        name="ring.weighted_mean",
        signature="comm, gradient, num_samples",
        inputs=lambda rank, case: (case.tensor(rank), _num_samples(rank, case)),
        target=lambda rank, case: Target(messages=2 * (case.world_size - 1)),
        # r is the rank, c the case.
        mistakes={
            "weighted.ranks_alike": lambda r, c: c.total() / c.world_size,
            "weighted.sum": lambda r, c: _over_samples(c),
            "weighted.over_ranks": lambda r, c: _over_samples(c) / c.world_size,
            "weighted.sum_of_means": lambda r, c: c.total(),
            "weighted.some_ranks_alike": lambda r, c: c.total() / (c.world_size - 1),
            "weighted.means_over_samples": lambda r, c: c.total() / _all_samples(c),
            "weighted.own": lambda r, c: c.tensor(r),
        },
        sizes=(7, 1),
        drawn_size=DRAWN,
        world_sizes=world_sizes,
    )


def _num_samples(rank: int, case: Case) -> int:
    return case.integer(rank, 2, 9) + 8 * (rank % 2) if rank < case.world_size - 1 else 0


def _over_samples(case: Case) -> torch.Tensor:
    """The sum over the samples of all ranks."""
    return case.over_ranks(lambda rank: _num_samples(rank, case) * case.tensor(rank))


def _mean_over_samples(rank: int, case: Case) -> torch.Tensor:
    return _over_samples(case) / _all_samples(case)


def _all_samples(case: Case) -> int:
    return sum(_num_samples(rank, case) for rank in range(case.world_size))


def reduced(op: str, rank: int, case: Case) -> torch.Tensor:
    """What an all-reduce leaves on every rank: float32 [size]."""
    return case.total() / case.world_size if op == "mean" else case.total()


def _of_some_shape(rank: int, case: Case) -> tuple:
    """One argument: float32 [size], or a matrix."""
    return (_in_shape(case.tensor(rank)),)


def _reduced_in_shape(op: str, rank: int, case: Case) -> torch.Tensor:
    return _in_shape(reduced(op, rank, case))


def _in_shape(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(MATRIX) if flat.shape == (torch.Size(MATRIX).numel(),) else flat


def _target(cost_of: Callable[..., Cost], to: str, rank: int, case: Case) -> Target:
    peer = (rank + (1 if to == "right" else -1)) % case.world_size
    return case.target(cost_of, rank, peers={peer})


def _rotation_cost(num_elements: int, element_bytes: int, world_size: int, rank: int) -> Cost:
    steps = world_size - 1
    return Cost(steps, steps, steps * num_elements * element_bytes)


def _in_any_chunks(rank: int, case: Case) -> Target:
    exact = _target(ring_all_reduce_cost, "right", rank, case)
    return exact._replace(num_bytes=ring_target(case.size, 4, rank, case).num_bytes)


def ring_target(num_elements: int, element_bytes: int, rank: int, case: Case) -> Target:
    """The messages and bytes of the whole ring, with chunks of equal, padded size."""
    padded = -(-num_elements // case.world_size) * case.world_size
    cost = ring_all_reduce_cost(padded, element_bytes, case.world_size, rank)
    return Target(cost.messages, cost.num_bytes)


def _own_chunks(rank: int, case: Case) -> tuple:
    """One argument: P chunks, views of one tensor."""
    return (split_chunks(case.tensor(rank), case.world_size),)


def _owned_sum(rank: int, case: Case) -> list:
    owned = owned_chunk(rank, case.world_size)
    sums = _all_sums(rank, case)
    return [chunk if index == owned else None for index, chunk in enumerate(sums)]


def _all_sums(rank: int, case: Case) -> list[torch.Tensor]:
    return split_chunks(case.total(), case.world_size)


def _one_complete_chunk(rank: int, case: Case) -> tuple:
    chunks = split_chunks(case.tensor(rank), case.world_size)
    owned = owned_chunk(rank, case.world_size)
    chunks[owned].copy_(_all_sums(rank, case)[owned])
    return (chunks,)


def _leftward_cost(num_elements: int, element_bytes: int, world_size: int, rank: int) -> Cost:
    """Share-only to the left: a rank sends all chunks but chunk ``rank``, the last to come."""
    start, end = chunk_bounds(num_elements, world_size)[rank]
    steps = world_size - 1
    return Cost(steps, steps, (num_elements - (end - start)) * element_bytes)
