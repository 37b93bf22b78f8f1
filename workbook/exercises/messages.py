"""Page 00: the first messages, and the time that one takes.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from labkit import collectives
from workbook.exercises.grader import WORLD_SIZES, Case, Target, Verdict, answers, returns
from workbook.exercises.grader.exercise import DRAWN

_graded = partial(
    returns,
    inputs=lambda rank, case: (case.tensor(rank),),
    signature="comm, mine",
    sizes=(12, 5, 1),
    drawn_size=DRAWN,
    may_call=frozenset(),
)


def there_and_back(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, mine)``: ranks 0 and 1 return the sum of their tensors, the others None.

    Target: ranks 0 and 1 send one message of S bytes to each other, the others none.
    """
    return _graded(
        fn,
        lambda rank, case: _sum(range(2), case) if rank < 2 else None,
        name="messages.there_and_back",
        target=lambda rank, case: _messages({1 - rank} if rank < 2 else set(), case),
        world_sizes=world_sizes,
    )


def round_trip(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, mine)``: rank r returns the sum over ranks 0 to r, which it has sent on.

    Rank 0 returns the sum over all ranks, which has come home. Target per rank: one message of S
    bytes to its right neighbour.
    """
    return _graded(
        fn,
        lambda rank, case: _sum(range(rank + 1) if rank else range(case.world_size), case),
        name="messages.round_trip",
        target=lambda rank, case: _messages({(rank + 1) % case.world_size}, case),
        mistakes={
            "rank 0 has to return the sum that comes home from the last rank": (
                lambda rank, case: _sum(range(rank + 1), case)
            ),
        },
        world_sizes=world_sizes,
    )


def all_gather(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, mine)``: every rank returns all ranks' tensors, in the order of the ranks.

    Target per rank: P - 1 messages of S bytes.
    """

    def all_the_last(rank: int, case: Case) -> list[Tensor]:
        last = (rank + 1) % case.world_size
        return [case.tensor(r if r == rank else last) for r in range(case.world_size)]

    return _graded(
        fn,
        lambda rank, case: [case.tensor(other) for other in range(case.world_size)],
        name="messages.all_gather",
        target=lambda _, case: _messages(range(case.world_size - 1), case)._replace(peers=None),
        mistakes={
            "all entries hold what came last: were they received into one buffer?": all_the_last
        },
        library=collectives.all_gather,
        world_sizes=world_sizes,
    )


def _sum(ranks: Iterable[int], case: Case) -> Tensor:
    return torch.stack([case.tensor(rank).double() for rank in ranks]).sum(0).float()


def _messages(peers: Iterable[int], case: Case) -> Target:
    """One message of S bytes to each of them."""
    to = frozenset(peers)
    return Target(messages=len(to), num_bytes=4 * len(to) * case.size, peers=to)


# ((bytes, µs) of a small message, the same of a large one, bytes of a third) -> its µs. The small
# message is not always so small that its bytes cost nothing.
_THIRD_MESSAGES = [
    (((1_000, 12.0), (101_000, 212.0), 51_000), 112.0),
    (((4_000, 58.0), (1_004_000, 308.0), 2_004_000), 558.0),
    (((0, 30.0), (1_000, 30.5), 0), 30.0),
    (((500, 25.0), (2_500, 105.0), 250), 15.0),
]


def message_time(fn: Callable) -> Verdict:
    """Grade ``fn(small, large, num_bytes)``: µs of a message, on the line through two others.

    ``small`` and ``large`` are (bytes, µs).
    """

    def of_bytes(small: tuple[float, float], large: tuple[float, float], num_bytes: int) -> float:
        return (large[1] - small[1]) / (large[0] - small[0]) * num_bytes

    return answers(
        fn,
        _THIRD_MESSAGES,
        name="messages.message_time",
        signature="small, large, num_bytes",
        mistakes={
            "alpha is missing: a message without bytes takes time, too": of_bytes,
            "alpha is not the time of the small message, which has bytes, too": (
                lambda small, large, n: small[1] + of_bytes(small, large, n)
            ),
        },
    )
