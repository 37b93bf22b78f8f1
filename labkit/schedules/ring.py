"""The ring: which chunk each rank sends and receives at each step of ring all-reduce.

Symbols: P ranks, r a rank, s a step. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations" (2009), section 3.
"""

from collections.abc import Iterator
from typing import NamedTuple


class RingStep(NamedTuple):
    """What one rank does in one step of a ring: it sends and receives a message at the same time.

    ``phase`` is ``share_reduce`` or ``share_only``.
    """

    step: int
    phase: str
    dst: int
    send_chunk: int
    src: int
    recv_chunk: int


def ring_share_reduce(rank: int, world_size: int) -> Iterator[RingStep]:
    """The first half of ring all-reduce (the literature's reduce-scatter): P - 1 steps.

    At step s rank r sends chunk (r - s) mod P to its right neighbour, receives chunk
    (r - s - 1) mod P from its left neighbour, and adds it to its own values of that chunk. After
    the last step rank r holds the complete sum of chunk (r + 1) mod P.
    """
    yield from _ring(rank, world_size, "share_reduce", first=rank)


def ring_share_only(rank: int, world_size: int) -> Iterator[RingStep]:
    """The second half of ring all-reduce (the literature's all-gather): P - 1 steps.

    At step s rank r passes on chunk (r + 1 - s) mod P, which is complete, and receives the
    complete chunk (r - s) mod P.
    """
    yield from _ring(rank, world_size, "share_only", first=rank + 1)


def ring_all_reduce(rank: int, world_size: int) -> Iterator[RingStep]:
    """Ring all-reduce: share-reduce, then share-only; 2 (P - 1) steps."""
    yield from ring_share_reduce(rank, world_size)
    yield from ring_share_only(rank, world_size)


def _ring(rank: int, world_size: int, phase: str, first: int) -> Iterator[RingStep]:
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        chunk = (first - step) % world_size
        yield RingStep(step, phase, right, chunk, left, (chunk - 1) % world_size)


def owned_chunk(rank: int, world_size: int) -> int:
    """The chunk whose complete sum ``rank`` holds after ``ring_share_reduce``."""
    return (rank + 1) % world_size


def chunk_bounds(num_elements: int, world_size: int) -> list[tuple[int, int]]:
    """Cut ``num_elements`` into P chunks whose sizes differ by at most one element.

    The first ``num_elements mod P`` chunks are one element longer; some are empty when there are
    fewer elements than ranks. Returns P pairs (start, end), end excluded.
    """
    size, longer = divmod(num_elements, world_size)
    bounds, start = [], 0
    for chunk in range(world_size):
        end = start + size + (chunk < longer)
        bounds.append((start, end))
        start = end
    return bounds


def ring_contributions(world_size: int) -> list[list[list[frozenset[int]]]]:
    """Which ranks' values each chunk contains: [state][rank][chunk] -> the ranks already summed.

    State 0 is the start, and each of the 2 (P - 1) steps adds one state.
    """
    ranks = range(world_size)
    held = [[frozenset({rank}) for _ in ranks] for rank in ranks]
    states = [[list(row) for row in held]]
    for steps in zip(*(ring_all_reduce(rank, world_size) for rank in ranks)):
        sent = {rank: held[rank][step.send_chunk] for rank, step in zip(ranks, steps)}
        for rank, step in zip(ranks, steps):
            mine = held[rank][step.recv_chunk] if step.phase == "share_reduce" else frozenset()
            held[rank][step.recv_chunk] = mine | sent[step.src]
        states.append([list(row) for row in held])
    return states
