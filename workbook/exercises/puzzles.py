"""Page 19: ten puzzles, first right, then scored against a target.

A puzzle is passed when its score reaches its target. Rounds are counted along the
longest chain of messages that wait for each other; an exchange takes one round, as a send with its
recv does.

Symbols: P ranks, S bytes of a rank's tensor, N its elements.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.engine.comm.comm import Comm
from labkit.units import format_bytes, format_count, format_seconds, text_table
from workbook.exercises.grader import Case, Check, Target, Verdict
from workbook.exercises.grader.critical_path import (
    longest_wait,
    seconds_in_a_row,
    steps_in_a_row,
)
from workbook.exercises.grader.exercise import Found, Ranks
from workbook.exercises.grader.held_memory import PeakBytes

# Puzzle 6: the link.
LATENCY_S = 1e-3
BYTES_PER_S = 1e6
# Puzzle 10.
LAYERS = 64

# By puzzle: the best score of this session, and how it and the target are shown.
_SCORES: dict[str, tuple[float, str, str]] = {}


@dataclass(frozen=True, eq=False)
class Puzzle(Check):
    """An exercise with a score, the less the better, which has to reach a target.

    Attributes:
        score: (case, outcomes by rank) -> a number; None if it cannot be told.
        goal: case -> what passes; None if the case is not scored.
        shown: a score in words.
        lost: (case, outcomes by rank) -> where a score that is too large comes from, in words.
        slack: how much larger than the target a score may be.
    """

    score: Callable[[Case, Ranks], float | None] = lambda case, ranks: None
    goal: Callable[[Case], float | None] = lambda case: None
    shown: Callable[[float], str] = str
    lost: Callable[[Case, Ranks], str] = lambda case, ranks: ""
    slack: float = 0.0

    # Powers of two and others, one of them drawn; the last is shown on the scoreboard.
    world_sizes: tuple[int, ...] = (3, random.randint(5, 7), 8)

    def __call__(self, fn: Callable, *, world_sizes: tuple[int, ...] = ()) -> Verdict:
        world_sizes = world_sizes or self.world_sizes
        scored: dict[int, tuple[float, str, str]] = {}

        def reaches_its_target(case: Case, ranks: Ranks) -> Found:
            target = self.goal(case)
            score = self.score(case, ranks)
            broken = self.rule(case, ranks)
            if broken or target is None:
                return broken
            if score is None:
                return "with recv_any no rounds can be counted: receive from a rank that you name"
            row = (score, self.shown(score), self.shown(target))
            scored.setdefault(case.world_size, row)
            if score > target + self.slack:
                text = f"the score is {self.shown(score)}; the target is {self.shown(target)}"
                return text + self.lost(case, ranks)
            return None

        judged = replace(self, rule=reaches_its_target, more_cells=self.scores)
        verdict = super(Puzzle, judged).__call__(fn, world_sizes=world_sizes)
        if len(scored) == len(world_sizes):
            row = scored[world_sizes[-1]]
            _SCORES[self.name] = min(row, _SCORES.get(self.name, row))
        return verdict

    def scores(self, tried: Mapping[Case, Ranks]) -> dict[str, str]:
        """The table's cell with the first score of these cases and its target, if there is one."""
        for case, ranks in tried.items():
            target = self.goal(case)
            score = None if target is None else self.score(case, ranks)
            if target is not None and score is not None:
                return {"score": f"{self.shown(score)} (target {self.shown(target)})"}
        return {}


def scoreboard() -> None:
    """Print the best scores of this session beside the targets, on the most ranks."""
    rows = []
    for number, puzzle in enumerate(PUZZLES, start=1):
        _, *shown = _SCORES.get(puzzle.name, (0, "-", "-"))
        name = puzzle.name.removeprefix("puzzles.")
        rows.append([f"{number:2} {name}", *shown])
    print(text_table(["puzzle", "yours", "target"], rows))


def _in_rounds_words(rounds: float) -> str:
    return format_count(round(rounds), "round")


def _who_waited(
    case: Case,
    ranks: Ranks,
    latency_s: float = 1.0,
    bytes_per_s: float = math.inf,
    shown: Callable[[float], str] = _in_rounds_words,
) -> str:
    """Name the rank that waits longest, or else the one with the most calls."""
    cause = ""
    messages = sum(outcome.messages for outcome in ranks)
    if steps_in_a_row([outcome.steps for outcome in ranks]) == messages:
        cause = "\nno two messages are under way at the same time"
    elif bytes_per_s < math.inf and not any(s[0] == "exchange" for o in ranks for s in o.steps):
        cause = "\nno rank sends a segment while it receives the next one"
    longest = longest_wait([outcome.steps for outcome in ranks], latency_s, bytes_per_s)
    if longest is None:
        busiest = max(range(len(ranks)), key=lambda rank: len(ranks[rank].steps))
        calls = format_count(len(ranks[busiest].steps), "call")
        text = f". No rank waits for another; rank {busiest} has {calls} of comm, one by one"
        return text + cause
    text = f". Rank {longest.rank} waits longest: {shown(longest.wait_s)} for rank"
    return f"{text} {longest.peer}, in its call {longest.call} of comm{cause}"


def _who_sent_most(case: Case, ranks: Ranks) -> str:
    busiest = max(range(len(ranks)), key=lambda rank: ranks[rank].num_bytes)
    most = ranks[busiest]
    messages = format_count(most.messages, "message")
    text = f". Rank {busiest} sends most, {format_count(most.num_bytes, 'byte')} in {messages}"
    if most.num_bytes > 8 * most.messages:
        text += "\na message holds more than one number"
    elif most.num_bytes == 8 * most.messages:
        text += "\na result that is rounded to float32 takes 4 bytes, not 8"
    return text


_puzzle = partial(Puzzle, written=None, sizes=(24, 7), drawn_size=100_000)
_in_rounds = partial(
    _puzzle,
    score=lambda case, ranks: steps_in_a_row([outcome.steps for outcome in ranks]),
    # In a round, at most twice as many ranks can know something.
    goal=lambda case: math.ceil(math.log2(case.world_size)),
    shown=_in_rounds_words,
    lost=_who_waited,
)


def _to_all_others(rank: int, case: Case) -> Target:
    return Target(num_bytes=4 * case.size * (case.world_size - 1))


def _left_neighbors(rank: int, case: Case) -> Tensor:
    return case.tensor((rank - 1) % case.world_size)


def _no_exchange(case: Case, ranks: Ranks) -> Found:
    for outcome in ranks:
        if any(step[0] == "exchange" for step in outcome.steps):
            return "comm.exchange is not allowed in this puzzle: use send and recv"
    return None


# Every rank is in two messages, and an odd ring cannot pair all of its ranks at once.
pass_on = _in_rounds(
    "puzzles.pass_on",
    _left_neighbors,
    drawn_size=0,
    rule=_no_exchange,
    goal=lambda case: 2 + case.world_size % 2,
)


def _on_a_grid(rank: int, case: Case) -> Tensor:
    """[case.size]: multiples of 1/256, which float32 holds exactly, unlike their sums."""
    numbers = (case.tensor(rank) * 2**21).round().clamp(-(2**24) + 1, 2**24 - 1) / 256
    # The large sums of the first and the last rank nearly cancel, and their roundings remain; in
    # the second call they add up to more than an int32 holds.
    if rank == case.world_size - 1:
        return numbers.abs() * (2 * case.call - 1)
    if rank == 0:
        return numbers.abs()
    return numbers


def _not_rounded_once(case: Case, values: list[Any]) -> Found:
    exact = case.over_ranks(lambda rank: _on_a_grid(rank, case).double()).sum().float().item()
    for rank, value in enumerate(values):
        try:
            number = float(value)
        except (TypeError, ValueError):
            return f"rank {rank} returned a value of type {type(value).__name__}, not a number"
        if number != exact:
            text = f"rank {rank} returned {number!r}, but the exact sum, rounded once to float32, "
            text += f"is {exact!r}"
            sums = [_on_a_grid(r, case).double().sum().float() for r in range(case.world_size)]
            if number == torch.stack(sums).double().sum().float().item():
                text += "\neach rank's sum is rounded before the sums are added: round once"
            return text
    return None


# Exact partial sums in 8 bytes, the rounded result in 4.
same_bits = _puzzle(
    "puzzles.same_bits",
    inputs=lambda rank, case: (_on_a_grid(rank, case),),
    judge=_not_rounded_once,
    sizes=(5_000, 7),
    score=lambda case, ranks: sum(outcome.num_bytes for outcome in ranks),
    goal=lambda case: 12 * (case.world_size - 1),
    shown=partial(format_count, noun="byte"),
    lost=_who_sent_most,
)
# fn(comm, tensor) returns rank 0's tensor on every rank: a binomial tree.
broadcast = _in_rounds("puzzles.broadcast", lambda rank, case: case.tensor(0))
# fn(comm, tensor) returns the sum of the tensors of ranks 0 to its own: Hillis and Steele, 1986.
prefix_sum = _in_rounds(
    "puzzles.prefix_sum",
    lambda rank, case: case.total(range(rank + 1)),
    mistakes={
        "no sum goes from the last rank round to rank 0": lambda rank, case: case.total(
            (rank - back) % case.world_size
            for back in range(2 ** (case.world_size - 1).bit_length())
        )
    },
)
# fn(comm, tensor) returns the list of all tensors, for (P - 1) S bytes: Bruck and others, 1997.
all_gather = _in_rounds(
    "puzzles.all_gather",
    lambda rank, case: list(map(case.tensor, range(case.world_size))),
    target=_to_all_others,
)


def _long(rank: int, case: Case) -> Tensor:
    """A tensor of another length in each call: for any one length some segments are the best."""
    return case.random(rank, case.size + case.integer(0, 0, case.size // 2))


def _chain_s(case: Case) -> float | None:
    """The shortest time of a chain over all numbers of segments; None for a short tensor."""
    if case.size < 1000:
        return None
    num_bytes = _long(0, case).nbytes
    hops = case.world_size - 2
    return min((n + hops) * (LATENCY_S + num_bytes / n / BYTES_PER_S) for n in range(1, 200))


# In the time of a chain in segments of the best size; cleverer schedules are known.
long_broadcast = _puzzle(
    "puzzles.long_broadcast",
    lambda rank, case: _long(0, case),
    inputs=lambda rank, case: (_long(rank, case),),
    written=0,
    sizes=(80_000, 7),
    drawn_size=0,
    score=lambda case, ranks: seconds_in_a_row([o.steps for o in ranks], LATENCY_S, BYTES_PER_S),
    goal=_chain_s,
    shown=format_seconds,
    lost=partial(_who_waited, latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S, shown=format_seconds),
    # Segments of the best size may leave a short one, which is a message more.
    slack=1.5 * LATENCY_S,
)


def _blocks(rank: int, case: Case) -> Tensor:
    return case.random(50 * rank + case.size, case.world_size, case.size)


def _sum_of_row(row: int, case: Case) -> Tensor:
    return case.over_ranks(lambda rank: _blocks(rank, case)[row])


# The sum of row comm.rank of all blocks [P, N], for P - 1 rows: Träff, 2024.
reduce_blocks = _in_rounds(
    "puzzles.reduce_blocks",
    _sum_of_row,
    signature="comm, blocks",
    parts=lambda case: {
        f"the sum of row {r}": _sum_of_row(r, case) for r in range(case.world_size)
    },
    inputs=lambda rank, case: (_blocks(rank, case),),
    target=_to_all_others,
)
# fn(comm, tensor) returns the sum over the ranks, for any P: Bar-Noy, Kipnis and Schieber, 1993.
all_reduce = _in_rounds("puzzles.all_reduce", lambda rank, case: case.total())
# fn(comm, blocks) returns row comm.rank of all blocks [P, N], by rank: Bruck and others, 1997.
all_to_all = _in_rounds(
    "puzzles.all_to_all",
    lambda rank, case: torch.stack([_blocks(r, case)[rank] for r in range(case.world_size)]),
    signature="comm, blocks",
    inputs=lambda rank, case: (_blocks(rank, case),),
)


def _forward(layer: int, x: Tensor) -> Tensor:
    output = (x + layer).sin_().mul_(0.1)
    # Of the neighbor: layers of single numbers could go backward in any order.
    output[1:] += x[:-1]
    output[:1] += x[-1:]
    return output


def _backward(layer: int, x: Tensor, gradient: Tensor) -> Tensor:
    input_gradient = (x + layer).cos_().mul_(0.1).mul_(gradient)
    input_gradient[:-1] += gradient[1:]
    input_gradient[-1:] += gradient[:1]
    return input_gradient


def _input_gradient(rank: int, case: Case) -> list:
    # By the same operations as the learner's: over 64 layers another order would not be as close.
    inputs = [case.tensor(rank)]
    gradient = case.tensor(rank + 1)
    for layer in range(LAYERS - 1):
        inputs.append(_forward(layer, inputs[-1]))
    for layer in reversed(range(LAYERS)):
        gradient = _backward(layer, inputs[layer], gradient)
    return [gradient, None, None]


def _with_few_forwards(fn: Callable, comm: Comm, first: Tensor, gradient: Tensor) -> list:
    """The gradient of ``first``, the most that new tensors held, and after which call."""
    calls = []
    backwards = [LAYERS]
    peaks = [(0, "")]

    def note(call: str) -> None:
        if held.num_bytes > peaks[-1][0]:
            peaks.append((held.num_bytes, call))

    def forward(layer: int, x: Tensor) -> Tensor:
        if len(calls) == 2 * LAYERS:
            raise ValueError(f"forward was called more than {2 * LAYERS} times, twice per layer")
        calls.append(layer)
        output = _forward(layer, x)
        note(f"forward({layer}, ...)")
        return output

    def backward(layer: int, x: Tensor, gradient: Tensor) -> Tensor:
        if layer != backwards[-1] - 1:
            text = f"backward of layer {layer} came after that of layer {backwards[-1]}"
            raise ValueError(f"{text}: they go one by one, from the last layer to the first")
        backwards.append(layer)
        input_gradient = _backward(layer, x, gradient)
        note(f"backward({layer}, ...)")
        return input_gradient

    with PeakBytes() as held:
        input_gradient = fn(comm, forward, backward, first, gradient)
    again = "" if len(calls) > LAYERS else "\nno input is forgotten and computed again"
    return [input_gradient, held.num_bytes, peaks[-1][1] + again]


# The gradient through all layers, with at most two forwards of each: Chen and others, 2016.
recompute = _puzzle(
    "puzzles.recompute",
    _input_gradient,
    signature="comm, forward, backward, first, gradient",
    inputs=lambda rank, case: (case.tensor(rank), case.tensor(rank + 1)),
    call=_with_few_forwards,
    # Each rank works by itself, and to count its bytes takes time.
    world_sizes=(2,),
    sizes=(10_000, 7),
    drawn_size=0,
    score=lambda case, ranks: max(outcome.value[1] for outcome in ranks),
    # Segments of n, n - 1, ..., 1 layers, each shorter as one more input is kept, and a gradient.
    goal=lambda case: 4.0 * case.size * (math.isqrt(2 * LAYERS) + 1),
    shown=format_bytes,
    lost=lambda case, ranks: f". Most is held at {ranks[0].value[2]}",
)

PUZZLES = (pass_on, same_bits, broadcast, prefix_sum, all_gather)
PUZZLES += (long_broadcast, reduce_blocks, all_reduce, all_to_all, recompute)
