"""The checks of page 15: what a benchmark has to look at beside its clock.

Symbols: P ranks.
"""

import itertools
import math
import numbers
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from workbook.exercises.grader import WORLD_SIZES, Case, Mistake, Verdict, answers, returns
from workbook.exercises.grader.compare import fit, short
from workbook.exercises.grader.exercise import random_tensor
from workbook.exercises.grader.in_process import Question, ask
from workbook.exercises.grader.report import told

# (messages by rank of an epoch,): its ring all-reduces.
_COUNTED = {
    ((64, 64),): 32,
    ((2, 2),): 1,
    ((96, 96, 96, 96),): 16,
    ((12, 12, 12),): 3,
    ((0, 0, 0, 0, 0),): 0,
    ((40, 40, 40, 40, 40, 40),): 4,
}
# (samples of the data set, samples by rank, seconds by epoch): useful samples per second.
_RATES = {
    (1000, (500, 500), (9.0, 2.0, 2.5, 2.0)): 500.0,
    (1000, (1000, 1000), (9.0, 2.0, 2.5, 2.0)): 500.0,
    (1000, (300, 300), (3.0, 2.0, 2.0, 2.5)): 300.0,
    (800, (200, 200, 200, 200), (5.0, 1.0, 7.0, 1.0)): 800.0,
    (600, (600, 600, 600), (0.5, 1.0, 4.0, 1.0, 1.0, 9.0)): 600.0,
}
# Odd, even and one: only an odd number of pairs leaves a single median.
REPEATS = (7, 4, 1)


class _Replica(NamedTuple):
    """How one rank's tensor differs from the others': ``kind`` is also the mistake's id.

    ``rank`` is taken mod P, ``place`` is the index of the number that differs.
    """

    kind: str
    rank: int = 0
    place: int = 0


# The size of the tensor tells how the replicas differ: one call per size, all in one run. Every
# rank differs once, so that an answer that does not look at one of them is noticed.
_REPLICAS = {
    6: _Replica("far", -1),
    7: _Replica("never"),
    8: _Replica("far", 0),
    9: _Replica("far", 1),
    10: _Replica("far", 2),
    11: _Replica("one_place", 1, 0),
    12: _Replica("one_place", 0, -1),
    13: _Replica("last_bit", -1, 4),
    14: _Replica("last_bit", 0, 2),
    15: _Replica("order", 1),
    1: _Replica("never"),
}
# In a sum with the other numbers, or with an absolute tolerance, its last bit is lost.
_TINY = 1e-30


def synchronisations(fn: Callable) -> Verdict:
    """Grade ``fn(messages)``: how many ring all-reduces an epoch had, from each rank's messages.

    ``messages`` has one number per rank, 2 (P - 1) for each all-reduce. Runs in this process.
    """
    return answers(
        fn,
        _COUNTED,
        name="fairness.synchronisations",
        signature="messages",
        mistakes={
            "synchronisations.half": lambda messages: messages[0] / (len(messages) - 1),
            "synchronisations.of_all": lambda m: sum(m) / (2 * (len(m) - 1)),
            "synchronisations.ranks": lambda messages: messages[0] / (2 * len(messages)),
            "synchronisations.two": lambda messages: messages[0] / 2,
            "synchronisations.messages": lambda messages: messages[0],
        },
    )


def useful_rate(fn: Callable) -> Verdict:
    """Grade ``fn(train_size, samples_by_rank, epoch_seconds)``: useful samples per second.

    Of the median epoch without the first; samples that another rank has done, too, do not count.
    Runs in this process.
    """

    def rate(count: Callable, middle: Callable) -> Callable:
        return lambda train_size, by_rank, seconds: count(train_size, by_rank) / middle(seconds)

    def once(train_size: int, by_rank: Sequence[int]) -> int:
        return min(train_size, sum(by_rank))

    def later(seconds: Sequence[float]) -> float:
        return statistics.median(seconds[1:])

    return answers(
        fn,
        _RATES,
        name="fairness.useful_rate",
        signature="train_size, samples_by_rank, epoch_seconds",
        mistakes={
            "rate.counts_twice": rate(lambda size, by_rank: sum(by_rank), later),
            "rate.counts_undone": rate(lambda size, by_rank: size, later),
            "rate.one_rank": rate(lambda size, by_rank: by_rank[0], later),
            "rate.warm_up": rate(once, statistics.median),
            "rate.mean": rate(once, lambda seconds: statistics.fmean(seconds[1:])),
            "rate.best": rate(once, min),
            "rate.per_sample": lambda size, by_rank, seconds: later(seconds) / once(size, by_rank),
        },
    )


def replicas_agree(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: on every rank, whether all ranks' tensors are equal to the bit.

    The tensors are equal; or that of one rank differs in every number, in one number, in the last
    bit of one number, or in the order of its numbers.
    """
    return returns(
        fn,
        name="fairness.replicas_agree",
        inputs=_replica,
        signature="comm, tensor",
        judge=_judge,
        sizes=tuple(_REPLICAS),
        world_sizes=world_sizes,
    )


def _replica(rank: int, case: Case) -> tuple[torch.Tensor]:
    """[case.size], this rank's parameters."""
    kind, who, place = _REPLICAS[case.size]
    mine = random_tensor(case.size, case.size)
    mine[case.size // 3 :: 3] = _TINY
    if rank != who % case.world_size:
        return (mine,)
    if kind == "far":
        mine += 1
    if kind == "one_place":
        mine[place] += 1
    if kind == "last_bit":
        mine[place] = torch.nextafter(mine[place], torch.tensor(torch.inf))
    if kind == "order":
        # Neither the first nor the last number moves.
        mine[3:5] = mine[3:5].flip(0)
    return (mine,)


def _judge(case: Case, values: list[Any]) -> Mistake | None:
    kind, who, place = _REPLICAS[case.size]
    says = [fit(value, 0.0) for value in values]
    for rank, value in enumerate(says):
        if value is None:
            return Mistake("replicas.nothing", rank=rank)
        if not isinstance(value, numbers.Real) or value not in (True, False):
            return Mistake("replicas.kind", rank=rank, kind=short(values[rank]))
    if len(set(says)) > 1:
        told = ", ".join(f"rank {rank} says {bool(value)}" for rank, value in enumerate(says))
        return Mistake("replicas.disagree", says=told)
    if says[0] == (kind == "never"):
        return None
    return Mistake(f"replicas.{kind}", rank=who % case.world_size, place=place % case.size)


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
    seconds: "Seconds"
    found: Any


def interleaved_ratio(fn: Callable) -> Verdict:
    """Grade ``fn(a, b, repeats)``: the median over pairs of runs of b's seconds / a's.

    ``a()`` and ``b()`` return the seconds of one run, on a simulated machine that slows down.
    ``fn`` has to call each once to warm up, then make ``repeats`` pairs of one run each, which
    begin with a and with b alternately. Of an even number of pairs, either of the two middle
    ratios and anything between them is a median. Runs in this process.
    """
    # In one of them b is the faster one, so that a ratio turned to be above 1 is noticed.
    contests = tuple(zip((1.5, 0.6, 0.6), REPEATS))
    name, right = "fairness.interleaved_ratio", f"{REPEATS[0]} pairs in turns, ratio "
    judge = partial(
        *(ask, name, fn, [Question((contests,), "a and b in turns")], _wrong_contest),
        call=_timed,
        right=lambda answers: right + f"{float(answers[0][0].found):.3g}",
        signature="a, b, repeats",
    )
    return told(name, judge)


def _timed(fn: Callable, contests: Sequence[tuple[float, int]]) -> list[_Taken]:
    """What each contest took: b's seconds, where a takes one, and the number of pairs."""
    taken = []
    for cost_s, repeats in contests:
        watch = Stopwatch()
        found = fn(watch.contender("a", 1.0), watch.contender("b", cost_s), repeats)
        taken.append(_Taken(watch.order, watch.seconds, fit(found, 0.0)))
    return taken


def _wrong_contest(question: Question, all_taken: list[_Taken]) -> Mistake | None:
    (contests,) = question.args
    for (_, repeats), taken in zip(contests, all_taken):
        wrong = _wrong_order(taken.order, repeats) or _wrong_ratio(taken, all_taken)
        if wrong:
            return Mistake("told.place", place=f"with repeats={repeats}", what=wrong)
    return None


def _wrong_order(order: str, repeats: int) -> Mistake | None:
    """What is wrong with the order of the calls, such as ``abab...``."""
    if not order:
        return Mistake("turns.no_call")
    # With and without a pair to warm up.
    for calls in (order, order[2:]):
        if len(calls) > 2 and len(list(itertools.groupby(calls))) == 2:
            return Mistake("turns.not_in_turns")
    due = repeats + 1
    for name in "ab":
        if (count := order.count(name)) != due:
            return Mistake("turns.count", name=name, calls=count, due=due, repeats=repeats)
    pairs = [order[i : i + 2] for i in range(0, len(order), 2)]
    if any(pair not in ("ab", "ba") for pair in pairs):
        return Mistake("turns.pairs", pairs=" ".join(pairs))
    # The warm-up pair is not counted, so it may begin with either.
    if any(one == next_ for one, next_ in itertools.pairwise(pairs[1:])):
        return Mistake("turns.same_first")
    return None


Seconds = dict[str, list[float]]


def due_ratio(seconds: Seconds) -> float:
    """The median of the pairs' b / a, without the warm-up."""
    return statistics.median(_ratios(seconds))


def _ratios(seconds: Seconds) -> list[float]:
    return [b / a for a, b in zip(seconds["a"][1:], seconds["b"][1:])]


def _is_median(found: float, ratios: list[float]) -> bool:
    low, high = statistics.median_low(ratios), statistics.median_high(ratios)
    return low <= found <= high or _equal(found, low) or _equal(found, high)


def _equal(found: float, due: float) -> bool:
    """Whether two ratios are equal up to the rounding of float32."""
    return math.isclose(found, due, rel_tol=1e-5)


def _wrong_ratio(taken: _Taken, all_taken: list[_Taken]) -> Mistake | None:
    """The mistake that leads to these numbers, in all calls; None if this one is right."""
    found, seconds = taken.found, taken.seconds
    if isinstance(found, bool) or not isinstance(found, numbers.Real):
        return Mistake("ratio.kind", kind=short(found))
    if _is_median(float(found), _ratios(seconds)):
        return None
    why = next((Mistake(id) for id in mistaken_ratios(seconds) if _all_make(id, all_taken)), None)
    return Mistake("ratio.differs", why, found=found, due=due_ratio(seconds))


def _all_make(id: str, all_taken: list[_Taken]) -> bool:
    """Whether each number is the one to which the mistake leads."""
    return all(
        isinstance(found, numbers.Real) and _equal(float(found), mistaken_ratios(seconds)[id])
        for _, seconds, found in all_taken
    )


def mistaken_ratios(seconds: Seconds) -> dict[str, float]:
    """A mistake's id -> the ratio that it leads to."""
    a, b = seconds["a"][1:], seconds["b"][1:]
    pairs = _ratios(seconds)
    return {
        "ratio.upside_down": statistics.median(x / y for x, y in zip(a, b)),
        "ratio.warm_up": statistics.median(b / a for a, b in zip(seconds["a"], seconds["b"])),
        "ratio.of_medians": statistics.median(b) / statistics.median(a),
        "ratio.of_sums": sum(b) / sum(a),
        "ratio.mean": statistics.fmean(pairs),
        "ratio.of_bests": min(b) / min(a),
        "ratio.largest": max(pairs),
        "ratio.above_one": max(statistics.median(pairs), 1 / statistics.median(pairs)),
    }
