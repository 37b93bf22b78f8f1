"""The checks of page 15: replicas that agree to the bit, and a fair comparison of two times.

Symbols: P ranks.
"""

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from labkit.check.grading import WORLD_SIZES, Case, Mistake, Verdict, returns
from labkit.check.grading.compare import fit
from labkit.check.grading.in_process import Question, ask
from labkit.check.grading.report import told

# The size of the tensor tells how the replicas differ: one call per size, all in one run.
_FAR, _EQUAL, _LAST_BIT, _ORDER = 6, 7, 8, 9
# Odd: of an even number of pairs, the lower median would equal the median with the warm-up.
REPEATS = 7


def replicas_agree(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor)``: on every rank, whether all ranks' tensors are equal to the bit.

    Four cases are tried: the tensors are equal; that of the last rank differs a lot; it differs in
    the last bit of one number; rank 1 holds the same numbers in another order.
    """
    return returns(
        fn,
        name="fairness.replicas_agree",
        inputs=_replica,
        signature="comm, tensor",
        judge=_judge,
        sizes=(_FAR, _EQUAL, _LAST_BIT, _ORDER),
        world_sizes=world_sizes,
    )


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


def _judge(case: Case, values: list[Any]) -> Mistake | None:
    due = case.size == _EQUAL
    for rank, value in enumerate(values):
        if value is None:
            return Mistake("replicas.nothing", rank=rank)
        if not isinstance(value, bool):
            return Mistake("replicas.kind", rank=rank, kind=type(value).__name__)
    if len(set(values)) > 1:
        says = ", ".join(f"rank {rank} says {value}" for rank, value in enumerate(values))
        return Mistake("replicas.disagree", says=says)
    if values[0] == due:
        return None
    blind = {_FAR: "far", _LAST_BIT: "last_bit", _ORDER: "order", _EQUAL: "never"}
    return Mistake(f"replicas.{blind[case.size]}", last=case.world_size - 1)


# The factor of the first call of each, and that of the machine's noise at the n-th call.
_COLD = {"a": 10.0, "b": 4.0}
_HICCUPS = (1.0, 1.05, 1.3, 0.95, 0.8, 1.1, 0.9, 2.5, 1.2, 1.0, 0.85)


class Stopwatch:
    """Two contenders on a simulated machine that slows down: b takes 1.5 times as long as a.

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


def interleaved_ratio(fn: Callable) -> Verdict:
    """Grade ``fn(a, b, repeats)``: the median over pairs of runs of b's seconds / a's.

    ``a()`` and ``b()`` return the seconds of one run, on a simulated machine that slows down.
    ``fn`` has to call each once to warm up, then make ``repeats`` pairs of one run each, which
    begin with a and with b alternately. Runs in this process.
    """
    name = "fairness.interleaved_ratio"
    judge = partial(
        ask,
        name,
        fn,
        [Question((REPEATS,), "a and b in turns")],
        lambda _, timed: _wrong_order(timed[0]) or _wrong_ratio(*timed[1:]),
        call=_timed,
        right=lambda answers: f"{REPEATS} pairs in turns, ratio {answers[0][2]:.3g}",
        signature="a, b, repeats",
    )
    return told(name, judge)


def _timed(fn: Callable, repeats: int) -> tuple[str, "Seconds", Any]:
    """The order of the calls, the seconds of each, and what ``fn`` returns."""
    watch = Stopwatch()
    found = fn(watch.contender("a", 1.0), watch.contender("b", 1.5), repeats)
    return watch.order, watch.seconds, fit(found, 0.0)


def _wrong_order(order: str) -> Mistake | None:
    """What is wrong with the order of the calls, such as ``abab...``."""
    if not order:
        return Mistake("turns.no_call")
    due = REPEATS + 1
    half = len(order) // 2
    if len(set(order[:half])) == len(set(order[half:])) == 1 and order[0] != order[-1]:
        return Mistake("turns.not_in_turns")
    for name in "ab":
        if (calls := order.count(name)) != due:
            return Mistake("turns.count", name=name, calls=calls, due=due, repeats=REPEATS)
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
    return statistics.median(b / a for a, b in zip(seconds["a"][1:], seconds["b"][1:]))


def _wrong_ratio(seconds: Seconds, found: Any) -> Mistake | None:
    """The mistake that leads to this number; None if it is right."""
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return Mistake("ratio.kind", kind=type(found).__name__)
    due = due_ratio(seconds)
    if abs(found - due) < 1e-9:
        return None
    wrong = mistaken_ratios(seconds).items()
    why = next((Mistake(id) for id, ratio in wrong if abs(found - ratio) < 1e-9), None)
    return Mistake("ratio.differs", why, found=found, due=due)


def mistaken_ratios(seconds: Seconds) -> dict[str, float]:
    """A mistake's id -> the ratio that it leads to."""
    a, b = seconds["a"][1:], seconds["b"][1:]
    pairs = [y / x for x, y in zip(a, b)]
    return {
        "ratio.upside_down": statistics.median(x / y for x, y in zip(a, b)),
        "ratio.warm_up": statistics.median(b / a for a, b in zip(seconds["a"], seconds["b"])),
        "ratio.of_medians": statistics.median(b) / statistics.median(a),
        "ratio.of_sums": sum(b) / sum(a),
        "ratio.mean": statistics.fmean(pairs),
        "ratio.of_bests": min(b) / min(a),
        "ratio.largest": max(pairs),
    }
