"""Sentences made from measurements, for a page: what was found, or its opposite.

A page calls one after its measurement, so that the sentence is true on the reader's machine, too.
Every number in it comes from the measurement: phases, spans, counts. A difference that is smaller
than the spread of the repeats is not called one.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from labkit.runtime.launch import RunResult
from labkit.tracing.limits import COMMUNICATE, COMPUTE, state_of
from labkit.training.measured import MeasuredSplit
from labkit.training.result import TrainResult
from labkit.units import as_repeats, format_count, format_number, format_seconds, format_value

Run: TypeAlias = TrainResult | RunResult | MeasuredSplit
# A training run (the seconds of its epochs but the first), or repeats in seconds, taken in turns
# with those that they are compared with, if equally many.
Times: TypeAlias = TrainResult | float | Iterable[float]

# From this many repeats on, the spread is that of the middle half: one outlier says little.
_QUARTILES = 8
# A model agrees within this relative difference, or within repeats that differ by less than _WIDE.
_TOLERANCE, _WIDE = 0.1, 3


@dataclass(frozen=True)
class Ratio:
    """How many times as large one measurement is as another; of seconds: how many times as fast.

    ``repeats`` says in words what the spread is of (``5 pairs``); empty for a single one.
    """

    low: float
    median: float
    high: float
    repeats: str

    @property
    def is_larger(self) -> bool | None:
        """Whether the ratio is above 1; None if the spread comes within 1% of 1, or is none."""
        near = self.low <= 1.01 and self.high >= 0.99
        return None if near or not self.repeats else self.low > 1

    def __str__(self) -> str:
        return f"{format_number(self.median)} times"

    @property
    def spread(self) -> str:
        """The spread in words, for brackets."""
        if not self.repeats:
            return "measured once: repeat it"
        return f"{format_number(self.low)} to {format_number(self.high)} in {self.repeats}"


@dataclass(frozen=True)
class Verdict:
    """A sentence made from a measurement, and the comparison behind it, if there is one."""

    text: str
    ratio: Ratio | None = None

    def __repr__(self) -> str:
        return self.text


def speedup(one: Times, many: Times, ranks: int | None = None) -> Verdict:
    """Whether several ranks are faster than one device, and how long each of them computed.

    ``ranks`` may be left out for training runs.
    """
    ratio, who, its = _ratio(one, many), "ranks", "the average rank"
    if isinstance(many, TrainResult):
        ranks = many.config.world_size
        if many.config.strategy == "data_parallel":  # threads of one process
            who, its = "replicas", "the main thread"
    text = f"{ranks} {who} were {ratio} as fast as one device ({ratio.spread})"
    if ratio.is_larger is False:
        slower = Ratio(1 / ratio.high, 1 / ratio.median, 1 / ratio.low, ratio.repeats)
        text = f"{ranks} {who} took {slower} as long as one device ({slower.spread})"
    if ratio.is_larger is None:
        text += ": this measurement cannot tell them apart"
    elif isinstance(one, TrainResult) and isinstance(many, TrainResult):
        alone_s, mine_s = (
            sum(s for kind, s in run.phases_s.items() if state_of(kind) == COMPUTE)
            for run in (one, many)
        )
        text += f"; in the whole run, {its} computed {mine_s / alone_s:.0%} as long as one device"
    return Verdict(f"{text}.", ratio)


def faster(times: Mapping[str, Times]) -> Verdict:
    """Which of several ways, by name, is the fastest, compared with the others."""
    first, *others = sorted(times, key=lambda name: statistics.median(_seconds(times[name])))
    ratios = {name: _ratio(times[name], times[first]) for name in others}
    close = [name for name in others if ratios[name].is_larger is None]
    ahead = ", ".join(
        f"{ratios[name]} as fast as {name} ({ratios[name].spread})"
        for name in others
        if name not in close
    )
    if not close:
        return Verdict(f"Fastest: {first}, {ahead}.", ratios[others[0]])
    nearest = ratios[close[0]]
    spread = f"{close[0]} / {first}: {nearest.spread}" if nearest.repeats else nearest.spread
    text = f"Cannot be told apart: {first} and {', '.join(close)} ({spread})."
    return Verdict(f"{text} {first} was {ahead}." if ahead else text, nearest)


def race(
    runs: Mapping[str, TrainResult], accuracy: float | None = None, *, loss: float | None = None
) -> Verdict:
    """Which training run first reaches an accuracy on held-out samples, or a training loss.

    The clock is that of its epochs.
    """
    goal = f"{accuracy:.0%}" if accuracy is not None else f"loss {loss}"
    reached = {}
    for name, run in runs.items():
        ends_s = accumulate(epoch["seconds"] for epoch in run.epochs)
        for number, (end_s, epoch) in enumerate(zip(ends_s, run.epochs), start=1):
            if epoch["loss"] <= loss if loss is not None else epoch["test_accuracy"] >= accuracy:
                reached[name] = end_s, number
                break
    ends = "; ".join(
        f"{name} after {format_seconds(end_s)} and {format_count(number, 'epoch')}"
        for name, (end_s, number) in sorted(reached.items(), key=lambda item: item[1])
    )
    never = ", ".join(name for name in runs if name not in reached)
    return Verdict(f"First at {goal}: {ends or 'none'}{never and f'; never: {never}'}.")


def against_model(
    measured: float | Iterable[float],
    model: float,
    unit: str = "s",
    what: str = "the time",
    run: Run | None = None,
) -> Verdict:
    """Whether a measurement agrees with a formula: within 10%, or within the spread.

    A formula within a spread of more than a factor of three is neither confirmed nor refuted.

    Args:
        measured: the repeats, in ``unit``.
        model: what the formula gives, above 0.
        what: the quantity.
        run: the run that was measured, to name what limited it where the two differ.
    """
    repeats = as_repeats(measured)
    low, median, high = _middle(repeats)
    spread = f"{format_value(low, unit)} to {format_value(high, unit)} in "
    spread += _counted(len(repeats), "repeat")
    if len(repeats) == 1:
        spread = "measured once"
    text = f"{what[:1].upper()}{what[1:]} was {format_value(median, unit)} ({spread}), and the "
    text += f"model says {format_value(model, unit)}"
    inside = low <= model <= high
    if abs(median / model - 1) <= _TOLERANCE or (inside and high <= _WIDE * low):
        return Verdict(f"{text}: they agree.")
    if inside:
        return Verdict(f"{text}: the repeats differ too much to compare the two.")
    reason = f" {run.explain()}" if run is not None else ""
    return Verdict(f"{text}: measured is {format_number(median / model)} times the model.{reason}")


def overlap(run: TrainResult | RunResult) -> Verdict:
    """How much of a run's communication was hidden behind computing."""
    limit = run.explain()
    if not limit.hidden and not limit.shares.get(COMMUNICATE):
        return Verdict("No message was recorded, so there was nothing to hide.")
    return Verdict(f"{limit.hidden:.0%} of the communication was hidden behind computing.")


def staleness(result: TrainResult) -> Verdict:
    """How many updates late the gradients of an asynchronous run were, and whose were latest."""
    updates = result.notes.get("staleness", ())
    if not updates:
        raise ValueError(f"{result.config.strategy} counts no staleness: run an asynchronous one")
    every, workers = [late for _, late in updates], {worker for worker, _ in updates}
    means = ((statistics.fmean(late for who, late in updates if who == w), w) for w in workers)
    largest, latest = max(means)
    return Verdict(
        f"A gradient missed {format_number(statistics.fmean(every))} updates on average, of "
        f"{len(every):,} (at most {max(every)}); the rule for long runs with "
        f"{format_count(len(workers), 'worker')} says {len(workers) - 1}. Rank {latest}'s "
        f"were the latest, {format_number(largest)} on average."
    )


def _seconds(times: Times) -> list[float]:
    """Repeats in seconds; of a training run those of its epochs, without the one that warms up."""
    if not isinstance(times, TrainResult):
        return as_repeats(times)
    seconds = [epoch["seconds"] for epoch in times.epochs]
    return seconds[1:] or seconds


def _ratio(slower: Times, quicker: Times) -> Ratio:
    """How many times as fast the second is, repeat by repeat: those of a pair were taken in turns.

    Epochs of two runs are no pairs.
    """
    one, other = _seconds(slower), _seconds(quicker)
    are_runs = isinstance(slower, TrainResult) or isinstance(quicker, TrainResult)
    if len(one) == len(other) and not are_runs:
        repeats = _counted(len(one), "pair") if len(one) > 1 else ""
        return Ratio(*_middle([a / b for a, b in zip(one, other)]), repeats)
    (low, median, high), (least, usual, most) = _middle(one), _middle(other)
    noun, after = ("epoch", ", after the first") if are_runs else ("repeat", "")
    repeats = f"{len(one)} and {format_count(len(other), noun)}{after}"
    if len(one) == len(other):
        repeats = f"{_counted(len(one), noun)} of each{after}" if len(one) > 1 else ""
    return Ratio(low / most, median / usual, high / least, repeats)


def _counted(count: int, noun: str) -> str:
    """``5 pairs``, or what ``_middle`` makes of more: ``the middle half of 8 pairs``."""
    return "the middle half of " * (count >= _QUARTILES) + format_count(count, noun)


def _middle(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high): the range of a few values, the quartiles of 8 or more."""
    if len(values) < _QUARTILES:
        return min(values), statistics.median(values), max(values)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
