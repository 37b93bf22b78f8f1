"""Formulas: steps, messages and bytes of each algorithm. Exact, so tests hold them to the byte.

Symbols: P ranks, S bytes of the whole tensor (S = N elements x the size of one).
"""

from dataclasses import dataclass

from labkit.schedules import chunk_bounds, ring_all_reduce


@dataclass(frozen=True)
class Cost:
    """What one rank pays for one collective.

    Attributes:
        steps: rounds in which the rank sends, receives, or both at once.
        messages: messages this rank sends.
        num_bytes: payload bytes this rank sends.
    """

    steps: int
    messages: int
    num_bytes: int


def ring_all_reduce_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0
) -> Cost:
    """Ring all-reduce: 2 (P - 1) steps and messages, 2 (P - 1) / P x S bytes sent by each rank.

    The fraction is exact when P divides the number of elements; otherwise chunks differ by one
    element, and so do the ranks: the sum over the schedule's chunks is exact always.
    """
    bounds = chunk_bounds(num_elements, world_size)
    steps = list(ring_all_reduce(rank, world_size))
    sent = sum(bounds[step.send_chunk][1] - bounds[step.send_chunk][0] for step in steps)
    return Cost(len(steps), len(steps), sent * element_bytes)


def naive_all_reduce_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0
) -> Cost:
    """All-to-one and back: rank 0 receives P - 1 tensors of S bytes, then sends P - 1.

    Rank 0 needs 2 (P - 1) steps and sends (P - 1) S bytes; each other rank sends S bytes, once.
    """
    size = num_elements * element_bytes
    if world_size == 1:
        return Cost(0, 0, 0)
    if rank == 0:
        return Cost(2 * (world_size - 1), world_size - 1, (world_size - 1) * size)
    return Cost(2, 1, size)
