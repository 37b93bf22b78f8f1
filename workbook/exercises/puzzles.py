"""Page 17: ten puzzles, first right, then scored against the best that is known.

A puzzle is passed when its score is as good as the best known. Rounds are counted along the
longest chain of messages that wait for each other; an exchange takes one round, as a send with its
recv does.

Symbols: P ranks, S bytes of a rank's tensor, N its elements.
"""

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit import collectives
from labkit.comm.comm import Comm
from labkit.units import format_bytes, format_count, format_seconds, html_table, text_table
from workbook.exercises.grader import Case, Exercise, Target, Verdict, grader
from workbook.exercises.grader.critical_path import seconds_in_a_row, steps_in_a_row
from workbook.exercises.grader.exercise import Found, Ranks
from workbook.exercises.grader.held_memory import PeakBytes
from workbook.exercises.grader.own_run import own_run
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, told

# Odd and even, powers of two and others; the last is shown on the scoreboard.
WORLD_SIZES, WITH_SIX = (3, 8), (3, 6, 8)
# Puzzle 3: the messages that a rank may send, and what calls of comm leave behind; 8: the link.
MESSAGES, _SMALL_BYTES = 8, 48 * 2**10
LATENCY_S, BYTES_PER_S = 1e-3, 1e6


class Score(NamedTuple):
    """What a puzzle is scored by, once all values are right: one number, the less the better.

    Attributes:
        of: (case, outcomes by rank) -> the number; None if it cannot be told.
        best: case -> the best known; None for a case that is not scored.
        shown: the number -> its text, with a unit.
        source: who reaches the best, in words.
        slack: by which part of the best a number may be larger and still be as good.
    """

    of: Callable[[Case, Ranks], float | None]
    best: Callable[[Case], float | None]
    shown: Callable[[float], str]
    source: str
    slack: float = 0.0


# The puzzles -> status, score, its text and the best known, of the best try of this session.
_TRIED: dict[str, tuple[str, float, str, str]] = {}


def _puzzle(
    fn: Callable,
    world_sizes: tuple[int, ...],
    name: str,
    expected: Any = None,
    *,
    score: Score,
    rule: Callable[[Case, Ranks], Found] = lambda case, ranks: None,
    **more: Any,
) -> Verdict:
    """Grade a function that returns its result, unless ``more`` says otherwise."""
    scored, last = dict[int, tuple[float, str, str]](), world_sizes[-1]

    def as_good_as_the_best(case: Case, ranks: Ranks) -> Found:
        if broken := rule(case, ranks):
            return broken
        best, number = score.best(case), score.of(case, ranks)
        if best is None:
            return None
        if number is None:
            return "with recv_any the rounds cannot be counted: receive from a rank that you name"
        yours, best_known = score.shown(number), score.shown(best)
        scored.setdefault(case.world_size, (number, yours, best_known))
        if number > best * (1 + score.slack):
            return f"the score is {yours}; the best known is {best_known} ({score.source})"
        return None

    def judge() -> Verdict:
        verdict = grader.grade_on_ranks(fn, exercise, world_sizes)
        if verdict and last in scored:
            _, yours, best_known = scored[last]
            verdict.notes = [f"score {yours}, best known {best_known} ({score.source})"]
        return verdict

    fields: dict[str, Any] = {"written": None, "sizes": (24, 7), "drawn_size": 100_000} | more
    fields |= {"expected": expected} if expected else {}
    exercise = Exercise(f"puzzles.{name}", rule=as_good_as_the_best, **fields)
    verdict = told(exercise.name, judge)
    verdict.run_again = partial(own_run, fn, exercise)
    number, yours, best_known = scored.get(last, (math.inf, "-", "-"))
    if number <= _TRIED.get(name, ("", math.inf))[1]:
        _TRIED[name] = verdict.status, number, yours, best_known
    return verdict


def _in_rounds(best: Callable[[int], int], source: str) -> Score:
    """``best``: P -> the fewest rounds that are known."""
    return Score(
        lambda case, ranks: steps_in_a_row([outcome.steps for outcome in ranks]),
        lambda case: best(case.world_size),
        partial(format_count, noun="round"),
        source,
    )


def _in_log_rounds(source: str) -> Score:
    """log2 P rounds, rounded up: in one, at most twice as many ranks can know something."""
    return _in_rounds(lambda P: math.ceil(math.log2(P)), source)


def _in_bytes(of_one: int, source: str) -> Score:
    """Each rank but one sends and is sent to once: ``of_one`` bytes in all."""
    return Score(
        lambda case, ranks: sum(outcome.num_bytes for outcome in ranks),
        lambda case: of_one * (case.world_size - 1),
        partial(format_count, noun="byte"),
        source,
    )


def _to_all_others(rank: int, case: Case) -> Target:
    return Target(num_bytes=4 * case.size * (case.world_size - 1))


def _tensors(case: Case, first: int = 0) -> list[Tensor]:
    """Those of all ranks in their order, from ``first`` on around the circle."""
    return [case.tensor((first + i) % case.world_size) for i in range(case.world_size)]


def _left_neighbours(rank: int, case: Case) -> Tensor:
    return case.tensor((rank - 1) % case.world_size)


def _first_tensor(rank: int, case: Case) -> Tensor:
    return case.tensor(0)


def largest(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the largest number of all ranks' tensors, on every rank.

    All numbers are below -1. Score: the bytes that all ranks send; best 8 (P - 1).
    """

    def below_zero(rank: int, case: Case) -> Tensor:
        return -1 - case.tensor(rank).abs()

    return _puzzle(
        fn,
        world_sizes,
        "largest",
        lambda rank, case: max(below_zero(r, case).max().item() for r in range(case.world_size)),
        inputs=lambda rank, case: (below_zero(rank, case),),
        mistakes={
            "it is the rank's own largest: nothing of the others is in it": (
                lambda rank, case: below_zero(rank, case).max().item()
            ),
            "it is 0, but all numbers are negative: was the largest so far 0 at first?": (
                lambda rank, case: 0.0
            ),
        },
        score=_in_bytes(8, "one number from each rank but one, and one to each"),
        may_call=frozenset(dir(collectives)),
    )


def pass_on(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the left neighbour's tensor, without ``exchange``.

    Score: rounds; best 2 with an even P, else 3.
    """

    def no_exchange(case: Case, ranks: Ranks) -> Found:
        used = any(step[0] == "exchange" for outcome in ranks for step in outcome.steps)
        return "comm.exchange is not allowed in this puzzle: use send and recv" if used else None

    why = "every rank is in two messages, and an odd ring cannot pair all of its ranks at once"
    score = _in_rounds(lambda P: 2 + P % 2, why)
    return _puzzle(
        fn, world_sizes, "pass_on", _left_neighbours, drawn_size=0, rule=no_exchange, score=score
    )


def pass_in_place(fn: Callable, *, world_sizes: tuple[int, ...] = (3, 6)) -> Verdict:
    """Grade ``fn(comm, tensor)``: every rank's tensor goes to the right, in place.

    Target: 8 messages per rank at most. Score: the most memory that a rank's new tensors (and
    other objects) hold at one time; best S / 8.
    """

    def one_segment(case: Case) -> float | None:
        """Of a long tensor; what the first call imports, and Python's own, are not scored."""
        return 4.0 * -(-case.size // MESSAGES) if case.size > 1000 and case.call else None

    def call(fn: Callable, comm: Comm, tensor: Tensor) -> list:
        """The tensor, and the most that tensors and arrays of Python held."""
        tracemalloc.start()
        with PeakBytes() as held:
            fn(comm, tensor)
        others = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return [tensor, held.num_bytes + (others if others > _SMALL_BYTES else 0)]

    score = Score(
        lambda case, ranks: max(outcome.value[1] for outcome in ranks),
        one_segment,
        format_bytes,
        "one of eight segments waits in a spare tensor",
        # An array in place of the spare tensor is counted with the rest of Python.
        slack=0.8,
    )
    return _puzzle(
        fn,
        world_sizes,
        "pass_in_place",
        lambda rank, case: [_left_neighbours(rank, case), None],
        call=call,
        target=lambda rank, case: Target(messages=MESSAGES),
        sizes=(80_003, 10),
        drawn_size=0,
        score=score,
    )


def same_bits(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the sum of all numbers of all ranks, rounded once.

    The numbers are multiples of 1/256 below 65,536. Score: the bytes that all ranks send; best
    12 (P - 1).
    """

    def on_a_grid(rank: int, case: Case) -> Tensor:
        """[case.size]: multiples of 1/256, which float32 holds exactly, unlike their sums."""
        numbers = (case.tensor(rank) * 2**21).round().clamp(-(2**24) + 1, 2**24 - 1) / 256
        # The large sums of the first and the last rank nearly cancel, and their roundings remain.
        ends = {0: 1, case.world_size - 1: -1}
        return numbers.abs() * ends[rank] if rank in ends else numbers

    def rounded_once(case: Case, values: list[Any]) -> Found:
        exact = case.over_ranks(lambda rank: on_a_grid(rank, case).double()).sum().float().item()
        for rank, value in enumerate(values):
            try:
                found = torch.tensor(float(value), dtype=torch.float64).float().item()
            except (TypeError, ValueError, RuntimeError):
                return f"rank {rank} returned a value of type {type(value).__name__}, no number"
            if found != exact:
                text = f"rank {rank} returned {found!r}, but the exact sum, rounded once to "
                return f"{text}float32, is {exact!r}"
        return None

    return _puzzle(
        fn,
        world_sizes,
        "same_bits",
        inputs=lambda rank, case: (on_a_grid(rank, case),),
        judge=rounded_once,
        score=_in_bytes(12, "exact partial sums in 8 bytes, the rounded result in 4"),
        may_call=frozenset(dir(collectives)),
    )


def broadcast(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns rank 0's tensor on every rank.

    Score: rounds; best log2 P, rounded up.
    """
    score = _in_log_rounds("a binomial tree; in a round, twice as many ranks know at most")
    return _puzzle(fn, world_sizes, "broadcast", _first_tensor, score=score)


def prefix_sum(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the sum of the tensors of ranks 0 to ``comm.rank``.

    Score: rounds; best log2 P, rounded up.
    """

    def so_far(rank: int, case: Case) -> Tensor:
        return torch.stack(_tensors(case)[: rank + 1]).double().sum(0).float()

    score = _in_log_rounds("Hillis and Steele, 1986")
    return _puzzle(fn, world_sizes, "prefix_sum", so_far, score=score)


def all_gather(fn: Callable, *, world_sizes: tuple[int, ...] = WITH_SIX) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the list of all ranks' tensors, in the order of ranks.

    Target: (P - 1) S bytes per rank. Score: rounds; best log2 P, rounded up.
    """
    rotated = "the list begins with the rank's own tensor: put it into the order of the ranks"
    return _puzzle(
        fn,
        world_sizes,
        "all_gather",
        lambda rank, case: _tensors(case),
        target=_to_all_others,
        mistakes={rotated: lambda rank, case: _tensors(case, rank)},
        score=_in_log_rounds("Bruck and others, 1997"),
    )


def long_broadcast(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: rank 0's long tensor to all ranks, in place.

    Score: the time of its messages where each takes 1 ms and its bytes at 1 MB/s; best that of a
    chain of ranks through which the tensor goes in segments.
    """

    def chain_s(case: Case) -> float | None:
        """The shortest time of a chain over all numbers of segments; None for a short tensor."""
        if case.size < 1000:
            return None
        num_bytes, hops = 4 * case.size, case.world_size - 2
        return min((n + hops) * (LATENCY_S + num_bytes / n / BYTES_PER_S) for n in range(1, 200))

    score = Score(
        lambda case, ranks: seconds_in_a_row([o.steps for o in ranks], LATENCY_S, BYTES_PER_S),
        chain_s,
        format_seconds,
        "a chain in segments of the best size; cleverer schedules are known",
        slack=0.05,
    )
    more: dict[str, Any] = {"written": 0, "sizes": (8_000, 7), "drawn_size": 0}
    return _puzzle(fn, world_sizes, "long_broadcast", _first_tensor, score=score, **more)


def reduce_blocks(fn: Callable, *, world_sizes: tuple[int, ...] = WITH_SIX) -> Verdict:
    """Grade ``fn(comm, blocks)``: returns the sum over the ranks of their blocks ``comm.rank``.

    ``blocks`` [P, N]. Target: P - 1 blocks of bytes per rank. Score: rounds; best log2 P, rounded
    up.
    """

    def blocks(rank: int, case: Case) -> Tensor:
        return case.random(50 * rank + case.size, case.world_size, case.size)

    return _puzzle(
        fn,
        world_sizes,
        "reduce_blocks",
        lambda rank, case: case.over_ranks(lambda r: blocks(r, case)[rank]),
        signature="comm, blocks",
        inputs=lambda rank, case: (blocks(rank, case),),
        target=_to_all_others,
        score=_in_log_rounds("Träff, 2024"),
    )


def all_reduce(fn: Callable, *, world_sizes: tuple[int, ...] = WITH_SIX) -> Verdict:
    """Grade ``fn(comm, tensor)``: returns the sum over the ranks, on every rank.

    Score: rounds; best log2 P, rounded up, also where P is no power of two.
    """
    score = _in_log_rounds("Bar-Noy, Kipnis and Schieber, 1993")
    return _puzzle(fn, world_sizes, "all_reduce", lambda rank, case: case.total(), score=score)


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
        nothing = NOT_ATTEMPTED, math.inf, "-", "-"
        status, number, yours, best = _TRIED.get(puzzle.__name__, nothing)
        if status == NOT_YET and number < math.inf:
            status = "right, and not the best yet"
        rows.append([puzzle.__name__, yours, best, status])
    return Scoreboard(rows)
