"""The checks of page 15: replicas that agree to the bit, and a fair way to take times.

Symbols: P ranks.
"""

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from labkit.check.grading.core import WORLD_SIZES, grade
from labkit.check.grading.exercise import Case, Exercise
from labkit.check.grading.plain import from_a_stub
from labkit.check.grading.report import NOT_ATTEMPTED, NOT_YET, PASSED, Verdict, no_function, told

# What the replicas are like goes by the size of the tensor: one call each, all in one run.
_FAR, _EQUAL, _LAST_BIT, _ORDER = 6, 7, 8, 9
# Odd: of an even number the lower middle one is what the warm-up's ratio makes it, too.
_REPEATS = 7


def replicas_agree(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: on every rank, whether all ranks' tensors are equal to the bit.

    The tensors are equal; or the last rank's differs a lot, or in one number's last bit; or rank
    1 holds the same numbers in another order.
    """
    exercise = Exercise(
        "fairness.replicas_agree",
        inputs=_replica,
        written=None,
        judge=_judge,
        sizes=(_FAR, _EQUAL, _LAST_BIT, _ORDER),
    )
    return grade(fn, exercise, world_sizes)


def _replica(rank: int, case: Case) -> tuple[torch.Tensor]:
    """[case.size], this rank's parameters."""
    # Sums of these are exact in any order, and so large that the last bit of 3/8 is rounded away.
    mine = torch.arange(case.size) / 8
    mine[0] = 1024
    if case.size == _FAR and rank == case.world_size - 1:
        mine += 1
    if case.size == _LAST_BIT and rank == case.world_size - 1:
        mine[3] = torch.nextafter(mine[3], mine[4])
    if case.size == _ORDER and rank == 1:
        mine = mine.flip(0)
    return (mine,)


def _judge(case: Case, values: list[Any]) -> str | None:
    """What is wrong with the ranks' answers, in a sentence."""
    due = case.size == _EQUAL
    for rank, value in enumerate(values):
        if value is None:
            return f"rank {rank} returns nothing: every rank has to know"
        if not isinstance(value, bool):
            return f"rank {rank} returns {type(value).__name__}, where True or False is due"
    if len(set(values)) > 1:
        says = ", ".join(f"rank {rank} says {value}" for rank, value in enumerate(values))
        return f"{says}: each tells what it has seen itself. Bring the answers together"
    if values[0] == due:
        return None
    return _blind_to(case) if values[0] else "the replicas are equal to the bit, and all say False"


def _blind_to(case: Case) -> str:
    last = case.world_size - 1
    if case.size == _FAR:
        return f"rank {last} differs by 1 in every number, and nobody noticed: compare all ranks"
    if case.size == _LAST_BIT:
        return (
            f"rank {last} differs in the last bit of one number, and that passes for equal: "
            "allclose has a tolerance, and a sum rounds it away"
        )
    return (
        "rank 1 holds the same numbers in another order, and that passes for equal: a sum, the "
        "smallest or the largest number says nothing about places"
    )


# How much longer a first call takes, and what else the machine does at the n-th call.
_COLD = {"a": 10.0, "b": 4.0}
_HICCUPS = (1.0, 1.05, 1.3, 0.95, 0.8, 1.1, 0.9, 2.5, 1.2, 1.0, 0.85)


class _Stopwatch:
    """Two contenders on a machine that gets slower and slower: b takes 1.5 times a's time.

    The first call of each is cold, which costs a more than b; each call makes the next one slower
    by a tenth, with a hiccup now and then.
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


def interleaved_ratio(fn: Callable) -> Verdict:
    """Grade ``fn(a, b, repeats)``: a and b in turns, and the median of b's seconds / a's.

    ``a()`` and ``b()`` return the seconds of one run. Once each to warm up, then ``repeats`` pairs
    that begin with a and with b by turns. They are played on a made-up machine, which slows down.
    """
    name = "fairness.interleaved_ratio"

    def judge() -> Verdict:
        if not callable(fn):
            return Verdict(name, NOT_YET, notes=[no_function(fn)])
        watch = _Stopwatch()
        a, b = watch.contender("a", 1.0), watch.contender("b", 1.5)
        try:
            found = fn(a, b, _REPEATS)
        except Exception as error:
            if from_a_stub(error):
                return Verdict(name, NOT_ATTEMPTED)
            note = f"it raised {type(error).__name__}: {error}"
            return Verdict(name, NOT_YET, notes=[note])
        wrong = _wrong_order(watch.order) or _wrong_ratio(watch.seconds, found)
        if wrong:
            return Verdict(name, NOT_YET, notes=[wrong])
        return Verdict(name, PASSED, notes=[f"{_REPEATS} pairs in turns, ratio {found:.3g}"])

    return told(name, judge)


def _wrong_order(order: str) -> str | None:
    """What is wrong with the order of the calls, such as ``abab...``."""
    if not order:
        return "neither a nor b was called: each call runs it once and returns its seconds"
    due = _REPEATS + 1
    half = len(order) // 2
    if len(set(order[:half])) == len(set(order[half:])) == 1 and order[0] != order[-1]:
        return (
            "all runs of one come before all runs of the other: whatever the machine does "
            "meanwhile counts against the second"
        )
    for name in "ab":
        if (calls := order.count(name)) != due:
            return (
                f"{name} was called {calls} times, where {due} are due: once to warm up, then "
                f"{_REPEATS} repeats"
            )
    pairs = [order[i : i + 2] for i in range(0, len(order), 2)]
    if any(pair not in ("ab", "ba") for pair in pairs):
        return f"the calls were {' '.join(pairs)}: a pair is one run of each"
    # The warm-up pair is not counted, so it may begin with either.
    if any(one == next_ for one, next_ in itertools.pairwise(pairs[1:])):
        return (
            "pairs in a row begin with the same contender: on a machine that slows down the other "
            "is the later one in each. Let them take turns at beginning"
        )
    return None


def _due(seconds: dict[str, list[float]]) -> float:
    return statistics.median(b / a for a, b in zip(seconds["a"][1:], seconds["b"][1:]))


def _wrong_ratio(seconds: dict[str, list[float]], found: Any) -> str | None:
    """The mistake that leads to this number; None if it is right."""
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return f"a number is due, and it returns {type(found).__name__}"
    due = _due(seconds)
    if abs(found - due) < 1e-9:
        return None
    for sentence, wrong in _mistaken(seconds).items():
        if abs(found - wrong) < 1e-9:
            return f"{sentence}: {found:.3g}, where {due:.3g} is due"
    return f"it returns {found:.4g}, where the median of the pairs' b / a is {due:.4g}"


def _mistaken(seconds: dict[str, list[float]]) -> dict[str, float]:
    a, b = seconds["a"][1:], seconds["b"][1:]
    pairs = [y / x for x, y in zip(a, b)]
    with_cold = [y / x for x, y in zip(seconds["a"], seconds["b"])]
    return {
        "that is a / b, upside down": statistics.median(x / y for x, y in zip(a, b)),
        "the warm-up is counted": statistics.median(with_cold),
        "that is the ratio of the medians, not the median of the ratios: the pairs are torn apart":
            statistics.median(b) / statistics.median(a),
        "that is the ratio of the sums, in which the slowest repeat counts most":
            sum(b) / sum(a),
        "that is the mean of the ratios, which one hiccup moves": statistics.fmean(pairs),
        "that is the best of b over the best of a, two moments of which each had luck":
            min(b) / min(a),
        "that is the largest of the ratios": max(pairs),
    }  # fmt: skip
