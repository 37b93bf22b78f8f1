"""Page 15: what a benchmark has to look at beside its clock.

Symbols: P ranks.
"""

import itertools
import math
import numbers
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from workbook.exercises.grader import WORLD_SIZES, Case, Verdict, answers, ask, returns
from workbook.exercises.grader.compare import fit, short
from workbook.exercises.grader.exercise import Found
from workbook.exercises.grader.in_process import Question

# (messages by rank of an epoch,): its ring all-reduces.
_COUNTED = {
    ((64, 64),): 32,
    ((2, 2),): 1,
    ((96, 96, 96, 96),): 16,
    ((12, 12, 12),): 3,
    ((0, 0, 0, 0, 0),): 0,
    ((40, 40, 40, 40, 40, 40),): 4,
}


def synchronisations(fn: Callable) -> Verdict:
    """Grade ``fn(messages)``: how many ring all-reduces an epoch had, from each rank's messages.

    ``messages`` has one number per rank, 2 (P - 1) for each all-reduce. Runs in another process.
    """
    return answers(
        fn,
        _COUNTED,
        name="fairness.synchronisations",
        signature="messages",
        mistakes={
            "an all-reduce takes P - 1 steps to add and P - 1 more to spread the sum": (
                lambda messages: messages[0] / (len(messages) - 1)
            ),
            "every rank takes part in every all-reduce, so one rank's messages tell": (
                lambda messages: sum(messages) / (2 * (len(messages) - 1))
            ),
            "an all-reduce takes 2 (P - 1) messages per rank, not 2 P": (
                lambda messages: messages[0] / (2 * len(messages))
            ),
        },
    )


# (samples of the data set, samples by rank, seconds by epoch): useful samples per second.
_RATES = {
    (1000, (500, 500), (9.0, 2.0, 2.5, 2.0)): 500.0,
    (1000, (1000, 1000), (9.0, 2.0, 2.5, 2.0)): 500.0,
    (1000, (300, 300), (3.0, 2.0, 2.0, 2.5)): 300.0,
    (800, (200, 200, 200, 200), (5.0, 1.0, 7.0, 1.0)): 800.0,
    (600, (600, 600, 600), (0.5, 1.0, 4.0, 1.0, 1.0, 9.0)): 600.0,
    (700, (350, 350), (6.0, 1.0, 3.0)): 350.0,
}


def useful_rate(fn: Callable) -> Verdict:
    """Grade ``fn(train_size, samples_by_rank, epoch_seconds)``: useful samples per second.

    Of the median epoch without the first; samples that another rank has done, too, do not count.
    Runs in another process.
    """

    def later(seconds: Sequence[float]) -> float:
        return statistics.median(seconds[1:])

    return answers(
        fn,
        _RATES,
        name="fairness.useful_rate",
        signature="train_size, samples_by_rank, epoch_seconds",
        mistakes={
            "samples that several ranks went through count several times": (
                lambda size, by_rank, seconds: sum(by_rank) / later(seconds)
            ),
            "the whole data set counts, although in one case the ranks left samples out": (
                lambda size, by_rank, seconds: size / later(seconds)
            ),
            "the first epoch is in the median: it is warm-up": (
                lambda size, by_rank, seconds: min(size, sum(by_rank)) / statistics.median(seconds)
            ),
        },
    )


class _Replica(NamedTuple):
    """How one rank's tensor differs from the others'.

    ``rank`` is taken mod P, ``place`` is the index of the number that differs.
    """

    kind: str
    rank: int = 0
    place: int = 0


_KINDS = {
    "never": "all tensors are equal to the bit",
    "far": "the tensor of rank {rank} differs by 1 in every number",
    "one place": "the tensor of rank {rank} differs by 1 in its number {place}",
    "last bit": "the tensor of rank {rank} differs in the last bit of one number",
    "order": "rank {rank} holds the same numbers in another order",
}
# The size of the tensor tells how the replicas differ: one call per size, all in one run. Every
# rank differs once, so that an answer that does not look at one of them is noticed.
_REPLICAS = {
    6: _Replica("far", -1),
    7: _Replica("never"),
    8: _Replica("far", 0),
    9: _Replica("far", 1),
    10: _Replica("far", 2),
    11: _Replica("one place", 1, 0),
    12: _Replica("one place", 0, -1),
    13: _Replica("last bit", -1, 4),
    14: _Replica("last bit", 0, 2),
    15: _Replica("order", 1),
    1: _Replica("never"),
}
# In a sum with the other numbers, or with an absolute tolerance, its last bit is lost.
_TINY = 1e-30


def replicas_agree(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: on every rank, whether all ranks' tensors are equal to the bit.

    The tensors are equal; or that of one rank differs in every number, in one number, in the last
    bit of one number, or in the order of its numbers.
    """

    def replica(rank: int, case: Case) -> tuple[torch.Tensor]:
        """[case.size], this rank's parameters."""
        kind, who, place = _REPLICAS[case.size]
        mine = case.random(0, case.size)
        mine[case.size // 3 :: 3] = _TINY
        if rank != who % case.world_size:
            return (mine,)
        if kind == "far":
            mine += 1
        if kind == "one place":
            mine[place] += 1
        if kind == "last bit":
            mine[place] = torch.nextafter(mine[place], torch.tensor(torch.inf))
        if kind == "order":
            # Neither the first nor the last number moves.
            mine[3:5] = mine[3:5].flip(0)
        return (mine,)

    def judge(case: Case, values: list[Any]) -> Found:
        kind, who, place = _REPLICAS[case.size]
        says = [fit(value, 0.0) for value in values]
        for rank, value in enumerate(says):
            if not isinstance(value, numbers.Real) or value not in (True, False):
                return f"rank {rank} returns {short(values[rank])}, expected True or False"
        if all(value == (kind == "never") for value in says):
            return None
        told = ", ".join(f"rank {rank} says {bool(value)}" for rank, value in enumerate(says))
        words = _KINDS[kind].format(rank=who % case.world_size, place=place % case.size)
        return f"{words}, but {told}"

    return returns(
        fn,
        name="fairness.replicas_agree",
        inputs=replica,
        signature="comm, tensor",
        judge=judge,
        sizes=tuple(_REPLICAS),
        world_sizes=world_sizes,
    )


# Odd, even and one: only an odd number of pairs leaves a single median.
REPEATS = (7, 4, 1)
# The factor of the first call of each, and that of the machine's noise at the n-th call.
_COLD = {"a": 10.0, "b": 4.0}
_HICCUPS = (1.0, 1.05, 1.3, 0.95, 0.8, 1.1, 0.9, 2.5, 1.2, 1.0, 0.85)


class Stopwatch:
    """Two contenders on a simulated machine that slows down.

    The first call of each is cold, which slows a down more than b. Each call takes a tenth longer
    than the one before, with some noise.
    """

    def __init__(self) -> None:
        self.order = ""
        self.seconds: dict[str, list[float]] = {"a": [], "b": []}

    def contender(self, name: str, cost_s: float) -> Callable[[], float]:
        def run() -> float:
            cold = 1.0 if self.seconds[name] else _COLD[name]
            calls = len(self.order)
            seconds = cost_s * cold * 1.1**calls * _HICCUPS[calls % len(_HICCUPS)]
            self.order += name
            self.seconds[name].append(seconds)
            return seconds

        return run


class _Taken(NamedTuple):
    """One call of the learner's function: the order of its runs, their seconds, what it found."""

    order: str
    seconds: dict[str, list[float]]
    found: Any


def interleaved_ratio(fn: Callable) -> Verdict:
    """Grade ``fn(a, b, repeats)``: the median over pairs of runs of b's seconds / a's.

    ``a()`` and ``b()`` return the seconds of one run, on a simulated machine that slows down.
    ``fn`` has to call each once to warm up, then make ``repeats`` pairs of one run each, which
    begin with a and with b alternately. Of an even number of pairs, either of the two middle
    ratios and anything between them is a median. Runs in another process.
    """

    def call(fn: Callable, cost_s: float, repeats: int) -> _Taken:
        watch = Stopwatch()
        found = fn(watch.contender("a", 1.0), watch.contender("b", cost_s), repeats)
        return _Taken(watch.order, watch.seconds, fit(found, 0.0))

    # In one of them b is the faster one, so that a ratio turned to be above 1 is noticed.
    contests = tuple(zip((1.5, 0.6, 0.6), REPEATS))
    return ask(
        "fairness.interleaved_ratio",
        fn,
        [Question(one, f"with repeats={one[1]}") for one in contests],
        lambda question, taken: _wrong_contest(question.words, question.args[1], taken),
        call=call,
        right=lambda taken: f"{REPEATS[0]} pairs in turns, ratio {float(taken[0].found):.3g}",
        signature="a, b, repeats",
    )


def _wrong_contest(words: str, repeats: int, taken: _Taken) -> Found:
    order, seconds, found = taken
    pairs = [order[i : i + 2] for i in range(0, len(order), 2)]
    text = f"{words}: the calls came in the pairs {' '.join(pairs) or '(none)'}"
    if len(pairs) != repeats + 1 or any(pair not in ("ab", "ba") for pair in pairs):
        return f"{text}, expected one pair to warm up, then {repeats}, each of an a and a b"
    # The warm-up pair is not counted, so it may begin with either.
    if any(one == following for one, following in itertools.pairwise(pairs[1:])):
        return f"{text}: two in a row begin with the same one, which a slowing machine favours"
    if isinstance(found, bool) or not isinstance(found, numbers.Real):
        return f"{words}: the function returned {short(found)}, expected a number"
    found = float(found)
    a, b = seconds["a"][1:], seconds["b"][1:]
    ratios = [y / x for x, y in zip(a, b)]
    low, high = statistics.median_low(ratios), statistics.median_high(ratios)

    def like(one: float) -> bool:
        return math.isclose(found, one, rel_tol=1e-5)

    if low <= found <= high or like(low) or like(high):
        return None
    looks = {
        ": that is a / b": statistics.median(x / y for x, y in zip(a, b)),
        ": the warm-up pair is counted, too": statistics.median(
            y / x for x, y in zip(seconds["a"], seconds["b"])
        ),
        ": that is the ratio of the two medians, not the median of the pairs' ratios": (
            statistics.median(b) / statistics.median(a)
        ),
    }
    why = next((words for words, one in looks.items() if like(one)), "")
    text = (
        f"{words}: the function returned {found:.4g}, expected {statistics.median(ratios):.4g}, "
    )
    return f"{text}the median of the pairs' b / a{why}"
