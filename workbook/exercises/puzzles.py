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
    """One number, the less the better: ``of`` a run, and the ``best`` known, by ``source``.

    None is for what cannot be told, or is not scored. ``slack``: by which part of the best a
    number may be larger and still be as good.
    """

    of: Callable[[Case, Ranks], float | None]
    best: Callable[[Case], float | None]
    shown: Callable[[float], str]
    source: str
    slack: float = 0.0


# The puzzles in their order; status, score, its text and the best known, of this session's best.
_PUZZLES: list[str] = []
_TRIED: dict[str, tuple[str, float, str, str]] = {}


def _puzzle(
    name: str,
    asks: str,
    expected: Callable[[int, Case], Any] = lambda rank, case: None,
    on: tuple[int, ...] = WORLD_SIZES,
    *,
    score: Score,
    rule: Callable[[Case, Ranks], Found] = lambda case, ranks: None,
    **fields: Any,
) -> Callable[..., Verdict]:
    """The check of a puzzle: of a function that returns its result, unless ``fields`` differ."""
    usual: dict[str, Any] = {"written": None, "sizes": (24, 7), "drawn_size": 100_000}

    def check(fn: Callable, *, world_sizes: tuple[int, ...] = on) -> Verdict:
        scored, last = dict[int, tuple[float, str, str]](), world_sizes[-1]

        def as_good_as_the_best(case: Case, ranks: Ranks) -> Found:
            best, number = score.best(case), score.of(case, ranks)
            if (broken := rule(case, ranks)) or best is None:
                return broken
            if number is None:
                return "with recv_any no rounds can be counted: receive from a rank that you name"
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

        more = usual | fields | {"rule": as_good_as_the_best}
        exercise = Exercise(f"puzzles.{name}", expected, **more)
        verdict = told(exercise.name, judge)
        verdict.run_again = partial(own_run, fn, exercise)
        result = verdict.status, *scored.get(last, (math.inf, "-", "-"))
        _TRIED[name] = min(result, _TRIED.get(name, result), key=lambda tried: tried[1])
        return verdict

    check.__doc__ = f"Grade a function that {asks}."
    _PUZZLES.append(name)
    return check


def _in_rounds(best: Callable[[int], int], source: str) -> Score:
    """``best``: P -> the fewest rounds that are known."""
    return Score(
        lambda case, ranks: steps_in_a_row([outcome.steps for outcome in ranks]),
        lambda case: best(case.world_size),
        partial(format_count, noun="round"),
        source,
    )


# In a round, at most twice as many ranks can know something.
_in_log_rounds = partial(_in_rounds, lambda P: math.ceil(math.log2(P)))


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


def _tensors(case: Case) -> list[Tensor]:
    return [case.tensor(rank) for rank in range(case.world_size)]


def _left_neighbours(rank: int, case: Case) -> Tensor:
    return case.tensor((rank - 1) % case.world_size)


def _first_tensor(rank: int, case: Case) -> Tensor:
    return case.tensor(0)


def _below_zero(rank: int, case: Case) -> Tensor:
    return -1 - case.tensor(rank).abs()


largest = _puzzle(
    "largest",
    "returns the largest number of all ranks' tensors, all below -1; best 8 (P - 1) bytes",
    lambda rank, case: max(_below_zero(r, case).max().item() for r in range(case.world_size)),
    inputs=lambda rank, case: (_below_zero(rank, case),),
    score=_in_bytes(8, "one number from each rank but one, and one to each"),
    may_call=frozenset(dir(collectives)),
)


def _no_exchange(case: Case, ranks: Ranks) -> Found:
    used = any(step[0] == "exchange" for outcome in ranks for step in outcome.steps)
    return "comm.exchange is not allowed in this puzzle: use send and recv" if used else None


pass_on = _puzzle(
    "pass_on",
    "returns the left neighbour's tensor, without exchange; best 2 or 3 rounds",
    _left_neighbours,
    drawn_size=0,
    rule=_no_exchange,
    score=_in_rounds(
        lambda P: 2 + P % 2,
        "every rank is in two messages, and an odd ring cannot pair all of its ranks at once",
    ),
)


def _with_held_bytes(fn: Callable, comm: Comm, tensor: Tensor) -> list:
    """The tensor, and the most that tensors and arrays of Python held."""
    tracemalloc.start()
    with PeakBytes() as held:
        fn(comm, tensor)
    others = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return [tensor, held.num_bytes + (others if others > _SMALL_BYTES else 0)]


pass_in_place = _puzzle(
    "pass_in_place",
    "has the left neighbour's tensor in place, by 8 messages; best S / 8 held",
    lambda rank, case: [_left_neighbours(rank, case), None],
    (3, 6),
    call=_with_held_bytes,
    target=lambda rank, case: Target(messages=MESSAGES),
    sizes=(80_003, 10),
    drawn_size=0,
    score=Score(
        lambda case, ranks: max(outcome.value[1] for outcome in ranks),
        # Of a long tensor; what the first call imports, and Python's own, are not scored.
        lambda case: 4.0 * -(-case.size // MESSAGES) if case.size > 1000 and case.call else None,
        format_bytes,
        "one of eight segments waits in a spare tensor",
        # An array in place of the spare tensor is counted with the rest of Python.
        slack=0.8,
    ),
)


def _on_a_grid(rank: int, case: Case) -> Tensor:
    """[case.size]: multiples of 1/256, which float32 holds exactly, unlike their sums."""
    numbers = (case.tensor(rank) * 2**21).round().clamp(-(2**24) + 1, 2**24 - 1) / 256
    # The large sums of the first and the last rank nearly cancel, and their roundings remain.
    ends = {0: 1, case.world_size - 1: -1}
    return numbers.abs() * ends[rank] if rank in ends else numbers


def _not_rounded_once(case: Case, values: list[Any]) -> Found:
    exact = case.over_ranks(lambda rank: _on_a_grid(rank, case).double()).sum().float().item()
    for rank, value in enumerate(values):
        try:
            found = torch.tensor(float(value), dtype=torch.float64).float().item()
        except (TypeError, ValueError, RuntimeError):
            return f"rank {rank} returned a value of type {type(value).__name__}, no number"
        if found != exact:
            text = f"rank {rank} returned {found!r}, but the exact sum, rounded once to float32, "
            return f"{text}is {exact!r}"
    return None


same_bits = _puzzle(
    "same_bits",
    "returns the sum of all numbers, rounded once; best 12 (P - 1) bytes",
    inputs=lambda rank, case: (_on_a_grid(rank, case),),
    judge=_not_rounded_once,
    score=_in_bytes(12, "exact partial sums in 8 bytes, the rounded result in 4"),
    may_call=frozenset(dir(collectives)),
)

broadcast = _puzzle(
    "broadcast",
    "returns rank 0's tensor on every rank; best log2 P rounds",
    _first_tensor,
    score=_in_log_rounds("a binomial tree; in a round, twice as many ranks know at most"),
)

prefix_sum = _puzzle(
    "prefix_sum",
    "returns the sum of the tensors of ranks 0 to its own; best log2 P rounds",
    lambda rank, case: torch.stack(_tensors(case)[: rank + 1]).double().sum(0).float(),
    score=_in_log_rounds("Hillis and Steele, 1986"),
)

all_gather = _puzzle(
    "all_gather",
    "returns the list of all tensors, for (P - 1) S bytes; best log2 P rounds",
    lambda rank, case: _tensors(case),
    WITH_SIX,
    target=_to_all_others,
    score=_in_log_rounds("Bruck and others, 1997"),
)


def _chain_s(case: Case) -> float | None:
    """The shortest time of a chain over all numbers of segments; None for a short tensor."""
    num_bytes, hops = 4 * case.size, case.world_size - 2
    times_s = ((n + hops) * (LATENCY_S + num_bytes / n / BYTES_PER_S) for n in range(1, 200))
    return min(times_s) if case.size >= 1000 else None


long_broadcast = _puzzle(
    "long_broadcast",
    "has rank 0's long tensor in place; best the time of a chain in segments",
    _first_tensor,
    written=0,
    sizes=(8_000, 7),
    drawn_size=0,
    score=Score(
        lambda case, ranks: seconds_in_a_row([o.steps for o in ranks], LATENCY_S, BYTES_PER_S),
        _chain_s,
        format_seconds,
        "a chain in segments of the best size; cleverer schedules are known",
        slack=0.05,
    ),
)


def _blocks(rank: int, case: Case) -> Tensor:
    return case.random(50 * rank + case.size, case.world_size, case.size)


reduce_blocks = _puzzle(
    "reduce_blocks",
    "sums row comm.rank of all blocks [P, N], at P - 1 rows; best log2 P rounds",
    lambda rank, case: case.over_ranks(lambda r: _blocks(r, case)[rank]),
    WITH_SIX,
    signature="comm, blocks",
    inputs=lambda rank, case: (_blocks(rank, case),),
    target=_to_all_others,
    score=_in_log_rounds("Träff, 2024"),
)

all_reduce = _puzzle(
    "all_reduce",
    "returns the sum over the ranks, for any P; best log2 P rounds",
    lambda rank, case: case.total(),
    WITH_SIX,
    score=_in_log_rounds("Bar-Noy, Kipnis and Schieber, 1993"),
)


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
    for name in _PUZZLES:
        status, number, *both = _TRIED.get(name, (NOT_ATTEMPTED, math.inf, "-", "-"))
        if status == NOT_YET and number < math.inf:
            status = "right, and not the best yet"
        rows.append([name, *both, status])
    return Scoreboard(rows)
