"""Page 00: the first messages, and the time that one takes.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from labkit import collectives
from workbook.exercises.grader import WORLD_SIZES, Case, Exercise, Target, Verdict, answers, grade
from workbook.exercises.grader.exercise import DRAWN

# ((bytes, µs) of a small message, the same of a large one, bytes of a third) -> its µs. The small
# message is not always so small that its bytes cost nothing.
_THIRD_MESSAGES = [
    (((1_000, 12.0), (101_000, 212.0), 51_000), 112.0),
    (((4_000, 58.0), (1_004_000, 308.0), 2_004_000), 558.0),
    (((0, 30.0), (1_000, 30.5), 0), 30.0),
    (((500, 25.0), (2_500, 105.0), 250), 15.0),
]
_exercise = partial(
    Exercise, signature="comm, mine", written=None, sizes=(12, 5, 1), drawn_size=DRAWN
)
_OVERWRITTEN = "what came in has overwritten the rank's own numbers: receive into a new tensor"


def there_and_back(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, mine)``: ranks 0 and 1 return the sum of their tensors, the others None.

    Target: ranks 0 and 1 send one message of S bytes to each other, the others none.
    """
    exercise = _exercise(
        "messages.there_and_back",
        lambda rank, case: _sum(range(2), case) if rank < 2 else None,
        target=lambda rank, case: _one_message({1 - rank} if rank < 2 else set(), case),
        mistakes={_OVERWRITTEN: lambda rank, case: 2 * case.tensor(0) if rank < 2 else None},
    )
    return grade(fn, exercise, world_sizes)


def round_trip(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, mine)``: a sum goes once around the ring, from rank 0 back to rank 0.

    Rank r returns the sum over ranks 0 to r, which it has sent on; rank 0 that over all ranks,
    which has come home. Target per rank: one message of S bytes to its right neighbour.
    """
    exercise = _exercise(
        "messages.round_trip",
        lambda rank, case: _sum(range(rank + 1) if rank else range(case.world_size), case),
        target=lambda rank, case: _one_message({(rank + 1) % case.world_size}, case),
        mistakes={
            "rank 0 has to return the sum that comes home from the last rank": (
                lambda rank, case: _sum(range(rank + 1), case)
            ),
            "the ranks return what they received, without their own numbers": (
                lambda rank, case: _sum(range(rank or case.world_size), case)
            ),
            _OVERWRITTEN: (lambda rank, case: 2 ** (rank or case.world_size - 1) * case.tensor(0)),
        },
    )
    return grade(fn, exercise, world_sizes)


def all_gather(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, mine)``: every rank returns all ranks' tensors, in the order of the ranks.

    Target per rank: P - 1 messages of S bytes.
    """

    def all_the_last(rank: int, case: Case) -> list[Tensor]:
        last = (rank + 1) % case.world_size
        return [case.tensor(r if r == rank else last) for r in range(case.world_size)]

    exercise = _exercise(
        "messages.all_gather",
        lambda rank, case: [case.tensor(other) for other in range(case.world_size)],
        target=lambda rank, case: Target(
            case.world_size - 1, 4 * (case.world_size - 1) * case.size
        ),
        mistakes={
            "all entries hold what came last: were they received into one buffer?": all_the_last,
            "the entries are in the order in which they came, not in that of the ranks": (
                lambda rank, case: [
                    case.tensor((rank - step) % case.world_size) for step in range(case.world_size)
                ]
            ),
        },
        library=collectives.all_gather,
    )
    return grade(fn, exercise, world_sizes)


def message_time(fn: Callable) -> Verdict:
    """Grade ``fn(small, large, num_bytes)``: the µs of a message, from those of two others.

    ``small`` and ``large`` are (bytes, µs). The line alpha + beta x bytes through both is asked
    for. Runs in another process.
    """

    def beta(small: tuple[float, float], large: tuple[float, float]) -> float:
        return (large[1] - small[1]) / (large[0] - small[0])

    return answers(
        fn,
        _THIRD_MESSAGES,
        name="messages.message_time",
        signature="small, large, num_bytes",
        mistakes={
            "the line has a beginning, alpha: a message without bytes takes time, too": (
                lambda small, large, n: large[1] * n / large[0]
            ),
            "alpha is missing: it holds only the time of the bytes": (
                lambda small, large, n: beta(small, large) * n
            ),
            "alpha is not the time of the small message, which has bytes, too": (
                lambda small, large, n: small[1] + beta(small, large) * n
            ),
        },
    )


def _sum(ranks: Iterable[int], case: Case) -> Tensor:
    return torch.stack([case.tensor(rank).double() for rank in ranks]).sum(0).float()


def _one_message(peers: set[int], case: Case) -> Target:
    sends = len(peers)
    return Target(messages=sends, num_bytes=4 * sends * case.size, peers=frozenset(peers))
