"""Trees and exchanges: the sender and receiver at each step, for any number of ranks.

Symbols: P ranks, Q the largest power of two up to P, r a rank, s a step.
Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (2005), section 4.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Transfer(NamedTuple):
    """The messages of one rank in one step; a rank may take no part in some steps.

    Attributes:
        step: its number, the same on all ranks.
        dst: the rank to send to; None if this one only receives.
        src: the rank to receive from; None if this one only sends.
    """

    step: int
    dst: int | None
    src: int | None


def binomial_broadcast(rank: int, world_size: int, root: int = 0) -> Iterator[Transfer]:
    """Broadcast along a binomial tree: ceil(log2 P) steps; each doubles the ranks with the data.

    Count ranks from the root: v = (rank - root) mod P. At step s every v below 2^s has the data
    and sends it to v + 2^s, if that is below P.

        step 0    0 -> 1
        step 1    0 -> 2, 1 -> 3
        step 2    0 -> 4, 1 -> 5, 2 -> 6, 3 -> 7
    """
    from_root = (rank - root) % world_size
    for step in range((world_size - 1).bit_length()):
        reach = 2**step
        if reach <= from_root < 2 * reach:
            yield Transfer(step, None, (rank - reach) % world_size)
        elif from_root < reach and from_root + reach < world_size:
            yield Transfer(step, (rank + reach) % world_size, None)


def binomial_reduce(rank: int, world_size: int, root: int = 0) -> Iterator[Transfer]:
    """Reduce to the root: ``binomial_broadcast`` backwards in time, ceil(log2 P) steps."""
    last = (world_size - 1).bit_length() - 1
    for step, dst, src in reversed(list(binomial_broadcast(rank, world_size, root))):
        yield Transfer(last - step, src, dst)


def recursive_doubling(rank: int, world_size: int) -> Iterator[Transfer]:
    """All-reduce in pairs: after step s, groups of 2^(s + 1) ranks hold the sum of their group.

    At step s rank r exchanges its sum so far with the rank whose number differs in bit s:

        step 0    0 - 1   2 - 3   4 - 5   6 - 7
        step 1    0 - 2   1 - 3   4 - 6   5 - 7
        step 2    0 - 4   1 - 5   2 - 6   3 - 7

    If P is not a power of two, a fold comes first: ranks Q and up send their values to rank - Q,
    and get the result in ``recursive_doubling_return``. Steps: log2 Q, and one more with a fold.
    """
    yield from fold(rank, world_size)
    paired = largest_power_of_two(world_size)
    if rank >= paired:
        return
    first_step = 1 if paired < world_size else 0
    for bit in range(paired.bit_length() - 1):
        peer = rank ^ 2**bit
        yield Transfer(first_step + bit, peer, peer)


def fold(rank: int, world_size: int) -> Iterator[Transfer]:
    """Fold ranks Q and up into ranks 0 and up: one step, or none if P is a power of two."""
    paired = largest_power_of_two(world_size)
    if rank >= paired:
        yield Transfer(0, rank - paired, None)
    elif rank + paired < world_size:
        yield Transfer(0, None, rank + paired)


def recursive_doubling_return(rank: int, world_size: int) -> Iterator[Transfer]:
    """Undo the fold: ranks Q and up get the result. One step, or none if P is a power of two."""
    paired = largest_power_of_two(world_size)
    last = paired.bit_length()
    if rank >= paired:
        yield Transfer(last, None, rank - paired)
    elif rank + paired < world_size:
        yield Transfer(last, rank + paired, None)


def pairwise_exchange(rank: int, world_size: int) -> Iterator[Transfer]:
    """All-to-all in P - 1 steps: at step s rank r sends to r + s + 1, receives from r - s - 1.

    Numbers are mod P. In each step every rank receives one message: none has to take several.
    """
    for step in range(world_size - 1):
        yield Transfer(step, (rank + step + 1) % world_size, (rank - step - 1) % world_size)


def largest_power_of_two(world_size: int) -> int:
    """Return Q, the largest power of two up to P."""
    return 2 ** (world_size.bit_length() - 1)
