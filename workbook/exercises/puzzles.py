"""The ten puzzles of page 17: first right, then scored against the best that is known.

A puzzle is passed when its score is as good as the best known. Rounds are counted along the
longest chain of messages that wait for each other; an exchange takes one round, as a send with its
recv does.

Symbols: P ranks, S bytes of a rank's tensor, N its elements.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit import collectives
from labkit.units import format_bytes, format_count, format_seconds, html_table, text_table
from workbook.exercises.grader import Case, Exercise, Mistake, Target, Verdict, grade
from workbook.exercises.grader.critical_path import seconds_in_a_row, steps_in_a_row
from workbook.exercises.grader.exercise import Outcome, Score
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET

# Odd and even, powers of two and others; the last is shown on the scoreboard.
WORLD_SIZES = (3, 8)
WITH_SIX = (3, 6, 8)
SIZES = (24, 7)
# Puzzle 3: the messages that a rank may send; puzzle 8: the link.
MESSAGES = 8
LATENCY_S, BYTES_PER_S = 1e-3, 1e6

Ranks = tuple[Outcome, ...]
# The puzzles in their order -> their verdicts, as far as this session has tried them.
_TRIED: dict[str, Verdict | None] = {}


def _puzzle(fn: Callable, exercise: Exercise, world_sizes: tuple[int, ...]) -> Verdict:
    verdict = grade(fn, exercise, world_sizes)
    before = _TRIED.get(exercise.name)
    if before is None or not before.score or (verdict.score and verdict.score <= before.score):
        _TRIED[exercise.name] = verdict
    return verdict


def _rounds(case: Case, ranks: Ranks) -> int | None:
    return steps_in_a_row([outcome.steps for outcome in ranks])


def _bytes_in_all(case: Case, ranks: Ranks) -> int:
    return sum(outcome.num_bytes for outcome in ranks)


def _log2(case: Case) -> int:
    """log2 P, rounded up: in a round, at most twice as many ranks can know something."""
    return math.ceil(math.log2(case.world_size))


def _in_log_rounds(source: str) -> Score:
    return Score(_rounds, _log2, partial(format_count, noun="round"), source, of_rounds=True)


def _in_bytes(of_one: int, source: str) -> Score:
    """Each rank but one sends and is sent to once: ``of_one`` bytes in all."""
    return Score(
        _bytes_in_all,
        lambda case: of_one * (case.world_size - 1),
        partial(format_count, noun="byte"),
        source,
    )


def largest(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the largest number of all ranks' tensors, on every rank.

    All numbers are below -1. Score: the bytes that all ranks send; best 8 (P - 1).
    """
    exercise = Exercise(
        "puzzles.largest",
        inputs=lambda rank, case: (_below_zero(rank, case),),
        expected=_largest_of_all,
        written=None,
        mistakes={
            "puzzle.own": lambda r, c: _below_zero(r, c).max().item(),
            "puzzle.zero": lambda r, c: 0.0,
            "puzzle.magnitude": lambda r, c: min(
                _below_zero(rank, c).min().item() for rank in range(c.world_size)
            ),
        },
        sizes=SIZES,
        score=_in_bytes(8, "one number from each rank but one, and one to each"),
        may_call=frozenset(dir(collectives)),
    )
    return _puzzle(fn, exercise, world_sizes)


def _below_zero(rank: int, case: Case) -> Tensor:
    return -1 - case.tensor(rank).abs()


def _largest_of_all(rank: int, case: Case) -> float:
    return max(_below_zero(r, case).max().item() for r in range(case.world_size))


def pass_on(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the left neighbour's tensor, without ``exchange``.

    Score: rounds; best 2 with an even P, else 3.
    """
    exercise = Exercise(
        "puzzles.pass_on",
        expected=lambda rank, case: case.tensor((rank - 1) % case.world_size),
        written=None,
        mistakes={
            "puzzle.from_the_right": lambda r, c: c.tensor((r + 1) % c.world_size),
            "puzzle.own": lambda r, c: c.tensor(r),
        },
        sizes=SIZES,
        score=Score(
            _rounds,
            lambda case: 2 + case.world_size % 2,
            partial(format_count, noun="round"),
            "every rank is in two messages, and an odd ring cannot pair all of its ranks at once",
            rule=_no_exchange,
            of_rounds=True,
        ),
    )
    return _puzzle(fn, exercise, world_sizes)


def _no_exchange(case: Case, ranks: Ranks) -> Mistake | None:
    used = any(step[0] == "exchange" for outcome in ranks for step in outcome.steps)
    return Mistake("puzzle.exchange") if used else None


def pass_in_place(fn: Callable, *, world_sizes: tuple[int, ...] = (3, 6)) -> Verdict:
    """Grade ``fn(comm, tensor)``: every rank's tensor goes to the right, in place.

    Target: 8 messages per rank at most. Score: the most memory that a rank's new tensors (and
    other objects) hold at one time; best S / 8.
    """
    exercise = Exercise(
        "puzzles.pass_in_place",
        expected=lambda rank, case: case.tensor((rank - 1) % case.world_size),
        target=lambda rank, case: Target(messages=MESSAGES),
        mistakes={"puzzle.from_the_right": lambda r, c: c.tensor((r + 1) % c.world_size)},
        sizes=(80_003, 10),
        holds=True,
        score=Score(
            lambda case, ranks: max(outcome.held_bytes for outcome in ranks),
            _one_segment,
            format_bytes,
            "one of eight segments waits in a spare tensor",
            # An array in place of the spare tensor is counted with the rest of Python.
            slack=0.8,
        ),
    )
    return _puzzle(fn, exercise, world_sizes)


def _one_segment(case: Case) -> float | None:
    """Of a long tensor; what the first call imports, and Python's own objects, are not scored."""
    return 4.0 * -(-case.size // MESSAGES) if case.size > 1000 and case.call else None


def same_bits(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the sum of all numbers of all ranks, rounded once.

    The numbers are multiples of 1/256 below 65,536. Score: the bytes that all ranks send; best
    12 (P - 1).
    """
    exercise = Exercise(
        "puzzles.same_bits",
        inputs=lambda rank, case: (_on_a_grid(rank, case),),
        written=None,
        judge=_rounded_once,
        sizes=SIZES,
        score=_in_bytes(12, "exact partial sums in 8 bytes, the rounded result in 4"),
        may_call=frozenset(dir(collectives)),
    )
    return _puzzle(fn, exercise, world_sizes)


def _on_a_grid(rank: int, case: Case) -> Tensor:
    """[case.size]: multiples of 1/256, which float32 holds exactly, unlike their sums."""
    numbers = (case.tensor(rank) * 2**21).round().clamp(-(2**24) + 1, 2**24 - 1) / 256
    # The large sums of the first and the last rank nearly cancel, and their roundings remain.
    ends = {0: 1, case.world_size - 1: -1}
    return numbers.abs() * ends[rank] if rank in ends else numbers


def _rounded_once(case: Case, values: list[Any]) -> Mistake | None:
    numbers = [_on_a_grid(rank, case).double() for rank in range(case.world_size)]
    due = torch.stack(numbers).sum().float().item()
    for rank, value in enumerate(values):
        try:
            found = torch.tensor(float(value), dtype=torch.float64).float().item()
        except (TypeError, ValueError, RuntimeError):
            return Mistake("puzzle.no_number", rank=rank, found=type(value).__name__)
        if found != due:
            close = abs(found - due) < 1e-4 * abs(torch.stack(numbers)).sum().item()
            how = "puzzle.rounded" if close else "puzzle.other_sum"
            return Mistake(how, rank=rank, found=repr(found), due=repr(due))
    return None


def broadcast(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns rank 0's tensor on every rank.

    Score: rounds; best log2 P, rounded up.
    """
    exercise = Exercise(
        "puzzles.broadcast",
        expected=lambda rank, case: case.tensor(0),
        written=None,
        mistakes={"puzzle.own": lambda r, c: c.tensor(r)},
        sizes=SIZES,
        drawn_size=100_000,
        score=_in_log_rounds("a binomial tree; in a round, twice as many ranks know at most"),
    )
    return _puzzle(fn, exercise, world_sizes)


def prefix_sum(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the sum of the tensors of ranks 0 to ``comm.rank``.

    Score: rounds; best log2 P, rounded up.
    """
    exercise = Exercise(
        "puzzles.prefix_sum",
        expected=lambda rank, case: _sum_of(case, range(rank + 1)),
        written=None,
        mistakes={
            "puzzle.exclusive": lambda r, c: _sum_of(c, range(r)),
            "puzzle.suffix": lambda r, c: _sum_of(c, range(r, c.world_size)),
            "puzzle.total": lambda r, c: c.total(),
            "puzzle.two_alone": lambda r, c: _sum_of(c, range(max(0, r - 1), r + 1)),
        },
        sizes=SIZES,
        drawn_size=100_000,
        score=_in_log_rounds("Hillis and Steele, 1986"),
    )
    return _puzzle(fn, exercise, world_sizes)


def _sum_of(case: Case, ranks: Sequence[int]) -> Tensor:
    return sum((case.tensor(r).double() for r in ranks), torch.zeros(case.size).double()).float()


def all_gather(fn: Callable, *, world_sizes: tuple[int, ...] = WITH_SIX) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the list of all ranks' tensors, in the order of ranks.

    Target: (P - 1) S bytes per rank. Score: rounds; best log2 P, rounded up.
    """
    exercise = Exercise(
        "puzzles.all_gather",
        expected=lambda rank, case: [case.tensor(r) for r in range(case.world_size)],
        written=None,
        target=lambda rank, case: Target(num_bytes=4 * case.size * (case.world_size - 1)),
        mistakes={
            "puzzle.own_first": lambda r, c: [
                c.tensor((r + i) % c.world_size) for i in range(c.world_size)
            ],
            "puzzle.backwards": lambda r, c: [
                c.tensor((r - i) % c.world_size) for i in range(c.world_size)
            ],
        },
        sizes=SIZES,
        drawn_size=100_000,
        score=_in_log_rounds("Bruck and others, 1997"),
    )
    return _puzzle(fn, exercise, world_sizes)


def long_broadcast(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: rank 0's long tensor to all ranks, in place.

    Score: the time of its messages where each takes 1 ms and its bytes at 1 MB/s; best that of a
    chain of ranks through which the tensor goes in segments.
    """
    exercise = Exercise(
        "puzzles.long_broadcast",
        expected=lambda rank, case: case.tensor(0),
        sizes=(8_000, 7),
        score=Score(
            _seconds_on_the_link,
            _chain_s,
            format_seconds,
            "a chain in segments of the best size; cleverer schedules are known",
            slack=0.05,
        ),
    )
    return _puzzle(fn, exercise, world_sizes)


def _seconds_on_the_link(case: Case, ranks: Ranks) -> float | None:
    return seconds_in_a_row([outcome.steps for outcome in ranks], LATENCY_S, BYTES_PER_S)


def _chain_s(case: Case) -> float | None:
    """The shortest time of a chain over all numbers of segments; None for a short tensor."""
    if case.size < 1000:
        return None
    num_bytes, hops = 4 * case.size, case.world_size - 2
    return min((n + hops) * (LATENCY_S + num_bytes / n / BYTES_PER_S) for n in range(1, 200))


def reduce_blocks(fn: Callable, *, world_sizes: tuple[int, ...] = WITH_SIX) -> Verdict:
    """Grade ``fn(comm, blocks)``: returns the sum over the ranks of their blocks ``comm.rank``.

    ``blocks`` [P, N]. Target: P - 1 blocks of bytes per rank. Score: rounds; best log2 P, rounded
    up.
    """
    exercise = Exercise(
        "puzzles.reduce_blocks",
        signature="comm, blocks",
        inputs=lambda rank, case: (_blocks(rank, case),),
        expected=lambda rank, case: case.over_ranks(lambda r: _blocks(r, case)[rank]),
        written=None,
        target=lambda rank, case: Target(num_bytes=4 * case.size * (case.world_size - 1)),
        mistakes={
            "puzzle.own": lambda r, c: _blocks(r, c)[r],
            "puzzle.next_block": lambda r, c: c.over_ranks(
                lambda rank: _blocks(rank, c)[(r + 1) % c.world_size]
            ),
        },
        sizes=SIZES,
        drawn_size=100_000,
        score=_in_log_rounds("Träff, 2024"),
    )
    return _puzzle(fn, exercise, world_sizes)


def _blocks(rank: int, case: Case) -> Tensor:
    return case.random(50 * rank + case.size, case.world_size, case.size)


def all_reduce(fn: Callable, *, world_sizes: tuple[int, ...] = WITH_SIX) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the sum over the ranks, on every rank.

    Score: rounds; best log2 P, rounded up, also where P is no power of two.
    """
    exercise = Exercise(
        "puzzles.all_reduce",
        expected=lambda rank, case: case.total(),
        written=None,
        sizes=SIZES,
        drawn_size=100_000,
        score=_in_log_rounds("Bar-Noy, Kipnis and Schieber, 1993"),
    )
    return _puzzle(fn, exercise, world_sizes)


_PUZZLES = (largest, pass_on, pass_in_place, same_bits, broadcast)
_PUZZLES += (prefix_sum, all_gather, long_broadcast, reduce_blocks, all_reduce)


@dataclass(frozen=True)
class Scoreboard:
    """Puzzle, yours and the best known: the best that this session has checked."""

    rows: list[list[str]]

    def __repr__(self) -> str:
        return text_table(self.rows[0], self.rows[1:])

    def _repr_html_(self) -> str:
        return html_table(self.rows[0], self.rows[1:], of_words=True)


def scoreboard() -> Scoreboard:
    """The ten puzzles, with the verdicts of this session."""
    rows = [["puzzle", "yours", "best known", "state"]]
    for puzzle in _PUZZLES:
        verdict = _TRIED.get(f"puzzles.{puzzle.__name__}")
        # A verdict is falsy until it has passed.
        status = NOT_ATTEMPTED if verdict is None else verdict.status
        score = None if verdict is None else verdict.score
        if status == NOT_YET and score:
            status = "right, and not the best yet"
        rows.append([puzzle.__name__, *((score.yours, score.best) if score else "--"), status])
    return Scoreboard(rows)
