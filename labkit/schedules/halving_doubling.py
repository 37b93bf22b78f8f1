"""Halving and doubling: a reduce-scatter and an all-gather in log2 P exchanges each.

In the first half, ranks that keep the same blocks pair up: each sends the half that its partner
keeps, and adds the half that it keeps. The second half is the first one backwards: partners swap
the complete blocks. With four ranks and blocks 0 to 3, rank by rank:

    keeps at the start    0123   0123   0123   0123
    after 0 - 2, 1 - 3    01     01     23     23
    after 0 - 1, 2 - 3    0      1      2      3

If P is not a power of two, ``tree.fold`` comes first, and the ranks beyond the largest power wait
for ``tree.recursive_doubling_return``.

Symbols: P ranks, Q the largest power of two up to P; a tensor is cut into Q blocks. Source:
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(2005), section 4.5.
"""

from collections.abc import Iterator
from typing import NamedTuple

from labkit.schedules.ring import Blocks
from labkit.schedules.tree import largest_power_of_two


class HalvingStep(NamedTuple):
    """One exchange of the first half, with ``peer``: the blocks to send, and the blocks to keep.

    The peer keeps what is sent here, and sends what is kept here.
    """

    peer: int
    sent: Blocks
    kept: Blocks


def recursive_halving(rank: int, world_size: int) -> Iterator[HalvingStep]:
    """Reduce-scatter in log2 Q steps, after which rank r < Q owns block r; the others take none.

    The all-gather runs the same steps in reverse order: it sends ``kept``, receives ``sent``.
    """
    paired = largest_power_of_two(world_size)
    if rank >= paired:
        return
    first = 0
    end = paired
    while end - first > 1:
        middle = (first + end) // 2
        peer = rank ^ (middle - first)
        lower = (first, middle)
        upper = (middle, end)
        if rank < middle:
            yield HalvingStep(peer, sent=upper, kept=lower)
            end = middle
        else:
            yield HalvingStep(peer, sent=lower, kept=upper)
            first = middle
