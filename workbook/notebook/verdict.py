"""Sentences made from measurements, for a page: what was found, or its opposite.

A page calls one after its measurement, so that the sentence is true on the reader's machine, too.
Every number in it comes from the measurement: phases, spans, counts. A difference that is smaller
than the spread of the repeats is not called one.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import truediv
from typing import TypeAlias

from labkit.engine.runtime.launch import RunResult
from labkit.engine.tracing.limits import COMMUNICATE, COMPUTE, state_of
from labkit.training.result import TrainResult
from labkit.units import as_repeats, format_count, format_number, format_seconds

# A training run (the seconds of its epochs but the first), or repeats in seconds, taken in turns
# with those that they are compared with, if equally many.
Times: TypeAlias = TrainResult | float | Iterable[float]

# From this many repeats on, the spread is that of the middle half: one outlier says little.
_QUARTILES = 8
# A formula agrees within this relative difference, or within repeats that differ less than _WIDE.
_TOLERANCE = 0.1
_WIDE = 3


@dataclass(frozen=True)
class Ratio:
    """A ratio of two measurements; of seconds: how many times as fast the second is.

    ``repeats`` says in words what the spread is of (``5 pairs``); empty for a single one.
    """

    low: float
    median: float
    high: float
    repeats: str

    @property
    def is_larger(self) -> bool | None:
        """True if the ratio is above 1; None if the spread comes within 1% of 1, or is none."""
        is_near = self.low <= 1.01 and self.high >= 0.99
        if is_near or not self.repeats:
            return None
        return self.low > 1

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


def speedup(single: TrainResult, many: TrainResult) -> Verdict:
    """Say whether several ranks train faster than one device, and how long each of them computed.

    A run in one process has replicas, which are its threads, in place of ranks.
    """
    ratio = _ratio(single, many)
    ranks = many.config.world_size
    crew = "ranks"
    subject = "the average rank"
    if many.config.strategy == "data_parallel":
        crew = "replicas"
        subject = "the main thread"
    text = f"{ranks} {crew} were {ratio} as fast as one device ({ratio.spread})"
    if ratio.is_larger is False:
        slower = Ratio(1 / ratio.high, 1 / ratio.median, 1 / ratio.low, ratio.repeats)
        text = f"{ranks} {crew} took {slower} as long as one device ({slower.spread})"
    if ratio.is_larger is None:
        text += ": this measurement cannot tell them apart"
    else:
        share = f"{_computing_s(many) / _computing_s(single):.0%}"
        text += f"; in the whole run, {subject} computed {share} as long as one device"
    return Verdict(f"{text}.", ratio)


def _computing_s(run: TrainResult) -> float:
    return sum(seconds for kind, seconds in run.phases_s.items() if state_of(kind) == COMPUTE)


def faster(times: Mapping[str, Times]) -> Verdict:
    """Name the fastest of several ways, and compare it with the others."""
    first, *slower = sorted(times, key=lambda name: statistics.median(_seconds(times[name])))
    ratios = {name: _ratio(times[name], times[first]) for name in slower}
    close = [name for name in slower if ratios[name].is_larger is None]
    ahead = []
    for name, ratio in ratios.items():
        if name not in close:
            ahead.append(f"{ratio} as fast as {name} ({ratio.spread})")
    if not close:
        return Verdict(f"Fastest: {first}, {', '.join(ahead)}.", ratios[slower[0]])
    ratio = ratios[close[0]]
    spread = ratio.spread
    if ratio.repeats:
        spread = f"{close[0]} / {first}: {spread}"
    text = f"Cannot be told apart: {' and '.join([first, *close])} ({spread})."
    if ahead:
        text += f" {first} was {', '.join(ahead)}."
    return Verdict(text, ratio)


def race(
    runs: Mapping[str, TrainResult], accuracy: float | None = None, *, loss: float | None = None
) -> Verdict:
    """Name the training run that first reaches a held-out accuracy, or a training loss.

    The clock is that of its epochs.
    """
    goal = f"loss {loss}"
    if accuracy is not None:
        goal = f"{accuracy:.0%}"
    reached = {}
    for name, run in runs.items():
        ends_s = accumulate(epoch["seconds"] for epoch in run.epochs)
        for number, (end_s, epoch) in enumerate(zip(ends_s, run.epochs), start=1):
            if loss is not None:
                is_reached = epoch["loss"] <= loss
            else:
                is_reached = epoch["test_accuracy"] >= accuracy
            if is_reached:
                reached[name] = (end_s, number)
                break
    ends = []
    for name, (end_s, number) in sorted(reached.items(), key=lambda item: item[1]):
        epochs = format_count(number, "epoch")
        ends.append(f"{name} after {format_seconds(end_s)} and {epochs}")
    text = f"First at {goal}: {'; '.join(ends) or 'none'}"
    never = [name for name in runs if name not in reached]
    if never:
        text += f"; never: {', '.join(never)}"
    return Verdict(f"{text}.")


def against_model(
    measured_s: float | Iterable[float], model_s: float, what: str = "the time"
) -> Verdict:
    """Say whether a measurement agrees with a formula: within 10%, or within the spread.

    A formula within a spread of more than a factor of three is neither confirmed nor refuted.

    Args:
        measured_s: the repeats.
        model_s: what the formula gives, above 0.
        what: the quantity.
    """
    repeats = as_repeats(measured_s)
    low, median, high = _middle(repeats)
    spread = f"{format_seconds(low)} to {format_seconds(high)} in "
    spread += _counted(len(repeats), "repeat")
    if len(repeats) == 1:
        spread = "measured once"
    text = f"{what[:1].upper()}{what[1:]} was {format_seconds(median)} ({spread}), and the "
    text += f"formula says {format_seconds(model_s)}"
    inside = low <= model_s <= high
    if abs(median / model_s - 1) <= _TOLERANCE or (inside and high <= _WIDE * low):
        return Verdict(f"{text}: they agree.")
    if inside:
        return Verdict(f"{text}: the repeats differ too much to compare the two.")
    times = format_number(median / model_s)
    return Verdict(f"{text}: measured is {times} times the formula.")


def overlap(run: TrainResult | RunResult) -> Verdict:
    """Say how much of a run's communication was hidden behind computing."""
    limit = run.explain()
    if not limit.hidden and not limit.shares.get(COMMUNICATE):
        return Verdict("No message was recorded, so there was nothing to hide.")
    return Verdict(f"{limit.hidden:.0%} of the communication was hidden behind computing.")


def staleness(result: TrainResult) -> Verdict:
    """Say how many updates late an asynchronous run's gradients were, and whose were latest."""
    updates = result.notes.get("staleness", ())
    if not updates:
        raise ValueError(f"{result.config.strategy} counts no staleness: run an asynchronous one")
    missed_by_worker: dict[int, list[int]] = {}
    for worker, missed in updates:
        missed_by_worker.setdefault(worker, []).append(missed)
    means = {worker: statistics.fmean(missed) for worker, missed in missed_by_worker.items()}
    latest = max(means, key=lambda worker: (means[worker], worker))
    all_missed = [missed for _, missed in updates]
    workers = len(means)
    return Verdict(
        f"A gradient missed {format_number(statistics.fmean(all_missed))} updates on average, of "
        f"{len(all_missed):,} (at most {max(all_missed)}); the rule for long runs with "
        f"{format_count(workers, 'worker')} says {workers - 1}. Rank {latest}'s "
        f"were the latest, {format_number(means[latest])} on average."
    )


def _seconds(times: Times) -> list[float]:
    """Repeats in seconds; of a training run those of its epochs, without the one that warms up."""
    if not isinstance(times, TrainResult):
        return as_repeats(times)
    seconds = [epoch["seconds"] for epoch in times.epochs]
    return seconds[1:] or seconds


def _ratio(slower: Times, quicker: Times) -> Ratio:
    """The ratio slower / quicker, repeat by repeat: those of a pair were taken in turns.

    Epochs of two runs are no pairs.
    """
    slower_s = _seconds(slower)
    quicker_s = _seconds(quicker)
    count = len(slower_s)
    are_runs = isinstance(slower, TrainResult) or isinstance(quicker, TrainResult)
    are_as_many = count == len(quicker_s)
    if are_runs:
        noun = "epoch"
        after = ", after the first"
    else:
        noun = "repeat"
        after = ""
    if not are_as_many:
        repeats = f"{count} and {format_count(len(quicker_s), noun)}{after}"
    elif count == 1:
        repeats = ""
    elif are_runs:
        repeats = f"{_counted(count, noun)} of each{after}"
    else:
        repeats = _counted(count, "pair")
    if are_as_many and not are_runs:
        return Ratio(*_middle(list(map(truediv, slower_s, quicker_s))), repeats)
    low, median, high = _middle(slower_s)
    quicker_low, quicker_median, quicker_high = _middle(quicker_s)
    return Ratio(low / quicker_high, median / quicker_median, high / quicker_low, repeats)


def _counted(count: int, noun: str) -> str:
    """``5 pairs``, or what ``_middle`` makes of more: ``the middle half of 8 pairs``."""
    repeats = format_count(count, noun)
    return f"the middle half of {repeats}" if count >= _QUARTILES else repeats


def _middle(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high): the range of a few values, the quartiles of 8 or more."""
    if len(values) < _QUARTILES:
        return min(values), statistics.median(values), max(values)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
