"""The checks of page 00: the first messages, and the time that one takes.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from labkit import collectives
from workbook.exercises.grader import WORLD_SIZES, Case, Exercise, Target, Verdict, answers, grade
from workbook.exercises.grader.exercise import DRAWN

_SIZES = (12, 5, 1)
# ((bytes, µs) of a small message, the same of a large one, bytes of a third) -> its µs. The small
# message is not always so small that its bytes cost nothing.
_THIRD_MESSAGES = [
    (((1_000, 12.0), (101_000, 212.0), 51_000), 112.0),
    (((4_000, 58.0), (1_004_000, 308.0), 2_004_000), 558.0),
    (((0, 30.0), (1_000, 30.5), 0), 30.0),
    (((500, 25.0), (2_500, 105.0), 250), 15.0),
]


def there_and_back(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, mine)``: ranks 0 and 1 return the sum of their tensors, the others None.

    Target: ranks 0 and 1 send one message of S bytes to each other, the others none.
    """
    exercise = _exercise(
        "messages.there_and_back",
        lambda rank, case: _sum(range(2), case) if rank < 2 else None,
        lambda rank, case: _one_message({1 - rank} if rank < 2 else set(), case),
        {
            "trip.not_added": lambda rank, case: case.tensor(0) if rank < 2 else None,
            "trip.overwritten": lambda rank, case: 2 * case.tensor(0) if rank < 2 else None,
            "trip.no_answer": lambda rank, case: [case.tensor(0), _sum(range(2), case), None][
                min(rank, 2)
            ],
            "trip.own_sent": lambda rank, case: [case.tensor(1), _sum(range(2), case), None][
                min(rank, 2)
            ],
        },
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
        lambda rank, case: _one_message({(rank + 1) % case.world_size}, case),
        {
            "trip.not_added": lambda rank, case: case.tensor(0),
            "trip.what_came": lambda rank, case: _sum(range(rank or case.world_size), case),
            "trip.overwritten": lambda rank, case: (
                2 ** (rank or case.world_size - 1) * case.tensor(0)
            ),
            "trip.not_home": lambda rank, case: _sum(range(rank + 1), case),
            "trip.own_sent": lambda rank, case: (
                _sum((rank - 1, rank), case) if rank else case.tensor(case.world_size - 1)
            ),
        },
    )
    return grade(fn, exercise, world_sizes)


def all_gather(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, mine)``: every rank returns all ranks' tensors, in the order of the ranks.

    Target per rank: P - 1 messages of S bytes.
    """
    exercise = _exercise(
        "messages.all_gather",
        lambda rank, case: [case.tensor(other) for other in range(case.world_size)],
        lambda rank, case: Target(case.world_size - 1, 4 * (case.world_size - 1) * case.size),
        {"gather.order": _as_they_come, "gather.one_buffer": _all_the_last},
        collectives.all_gather,
    )
    return grade(fn, exercise, world_sizes)


def message_time(fn: Callable) -> Verdict:
    """Grade ``fn(small, large, num_bytes)``: the µs of a message, from those of two others.

    ``small`` and ``large`` are (bytes, µs). The line alpha + beta x bytes through both is asked
    for. Runs in this process.
    """
    return answers(
        fn,
        _THIRD_MESSAGES,
        name="messages.message_time",
        signature="small, large, num_bytes",
        mistakes={
            "line.proportional": lambda small, large, n: large[1] * n / large[0],
            "line.no_alpha": lambda small, large, n: _beta(small, large) * n,
            "line.alpha_is_small": lambda small, large, n: small[1] + _beta(small, large) * n,
            "line.beta_of_large": lambda small, large, n: small[1] + large[1] / large[0] * n,
            "line.upside_down": lambda small, large, n: n / _beta(small, large),
        },
    )


def _exercise(
    name: str,
    expected: Callable[[int, Case], Any],
    target: Callable[[int, Case], Target],
    mistakes: Mapping[str, Callable[[int, Case], Any]],
    library: Callable | None = None,
) -> Exercise:
    """``fn(comm, mine)``, judged by what each rank returns and sends."""
    return Exercise(
        name,
        expected=expected,
        signature="comm, mine",
        written=None,
        target=target,
        mistakes=mistakes,
        sizes=_SIZES,
        library=library,
        drawn_size=DRAWN,
    )


def _sum(ranks: Iterable[int], case: Case) -> Tensor:
    return torch.stack([case.tensor(rank).double() for rank in ranks]).sum(0).float()


def _one_message(peers: set[int], case: Case) -> Target:
    sends = len(peers)
    return Target(messages=sends, num_bytes=4 * sends * case.size, peers=frozenset(peers))


def _as_they_come(rank: int, case: Case) -> list[Tensor]:
    """In the order in which they come around the ring: this rank's own tensor first."""
    return [case.tensor((rank - step) % case.world_size) for step in range(case.world_size)]


def _all_the_last(rank: int, case: Case) -> list[Tensor]:
    """All others received into one tensor, in steps: the right neighbour's comes last."""
    last = (rank + 1) % case.world_size
    return [case.tensor(r if r == rank else last) for r in range(case.world_size)]


def _beta(small: tuple[float, float], large: tuple[float, float]) -> float:
    """Seconds per byte, here in µs."""
    return (large[1] - small[1]) / (large[0] - small[0])
