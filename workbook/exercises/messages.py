"""Page 00: the first messages, and the time that a message takes.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Iterable
from functools import partial

from labkit import collectives
from workbook.exercises.grader import Case, Check, Target, solved
from workbook.exercises.grader.exercise import DRAWN

_check = partial(
    Check,
    signature="comm, mine",
    written=None,
    sizes=(12, 5, 1),
    # Not only up to 4, for which a pattern may be written down.
    world_sizes=(2, 3, 5),
    drawn_size=DRAWN,
)


def _messages(peers: Iterable[int], case: Case) -> Target:
    """One message of S bytes to each of them."""
    to = frozenset(peers)
    return Target(messages=len(to), num_bytes=4 * len(to) * case.size, peers=to)


# fn(comm, mine): ranks 0 and 1 return the sum of their tensors, the others None.
there_and_back = _check(
    "messages.there_and_back",
    lambda rank, case: case.total(range(2)) if rank < 2 else None,
    target=lambda rank, case: _messages({1 - rank} if rank < 2 else set(), case),
)
# fn(comm, mine): rank r returns the sum over ranks 0 to r, which it sends on; rank 0 over all.
round_trip = _check(
    "messages.round_trip",
    lambda rank, case: case.total(range(rank + 1) if rank else None),
    target=lambda rank, case: _messages({(rank + 1) % case.world_size}, case),
)


# fn(comm, mine): every rank returns all ranks' tensors, in the order of the ranks.
all_gather = _check(
    "messages.all_gather",
    lambda rank, case: [case.tensor(other) for other in range(case.world_size)],
    target=lambda _, case: _messages(range(case.world_size - 1), case)._replace(peers=None),
    library=collectives.all_gather,
)


# (bytes, µs) of a small message, whose bytes may cost something, and of a large one; bytes.
_MESSAGES = (
    *(((1_000, 12.0), (101_000, 212.0), 51_750), ((4_000, 58.0), (1_004_000, 308.0), 2_004_000)),
    *(((0, 30.0), (1_000, 30.5), 0), ((500, 25.0), (2_500, 105.0), 250)),
)


@solved(
    *_MESSAGES,
    mistakes={
        "the bytes of a message come first, then its time": (
            lambda time_us, small, large, n: time_us(small[::-1], large[::-1], n)
        ),
        "the time is not in proportion to the bytes: each message has its alpha": (
            lambda time_us, small, large, n: large[1] / large[0] * n
        ),
    },
)
def message_time(small: tuple[int, float], large: tuple[int, float], num_bytes: int) -> float:
    """Grade ``fn(small, large, num_bytes)``: µs, on the line through two pairs (bytes, µs)."""
    return small[1] + (large[1] - small[1]) / (large[0] - small[0]) * (num_bytes - small[0])
