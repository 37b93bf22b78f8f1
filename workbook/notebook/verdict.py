"""Sentences made from measurements, for a page: what was found, or its opposite and why.

    speedup         several ranks against one device
    faster          which of several ways is the fastest, if it can be told
    race            which run is first at an accuracy on held-out samples
    against_model   a measurement against a formula
    bubble          how long the stages of a pipeline were idle, against the formula
    overlap         how much communication was hidden behind computing
    communication   the share of messages in a run's time
    staleness       how late the gradients of an asynchronous run were
    peak_memory     which run took the least memory

A page calls one after its measurement, so that the sentence is true on the reader's machine, too.
Every number and every reason in it comes from the measurement: phases, spans, counts, cores. A
difference that is smaller than the spread of the repeats is not called one.
"""

import html
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from labkit.config import RunConfig
from labkit.runtime.launch import RunResult
from labkit.tracing.limits import COMMUNICATE, COMPUTE, EVALUATE, WAIT, state_of
from labkit.training.measured import MeasuredSplit
from labkit.training.result import TrainResult
from labkit.units import as_repeats, format_count, format_number, format_seconds, format_value
from workbook.notebook.ratio import Ratio, middle

Run: TypeAlias = TrainResult | RunResult | MeasuredSplit
# A training run (the seconds of its epochs), or repeats in seconds.
Times: TypeAlias = TrainResult | float | Iterable[float]

_WORDS = {2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six", 7: "Seven", 8: "Eight"}
_PARTS = {1: "all", 2: "half", 3: "a third", 4: "a quarter"}
# The techniques in which every rank computes its share of the samples, and none only serves.
_SHARES_SAMPLES = ("data_parallel", "ddp", "ring_all_reduce")
# Repeats that differ by a larger factor do not confirm a model that lies between them.
_WIDE = 3


@dataclass(frozen=True)
class Verdict:
    """A sentence made from a measurement; it prints as that sentence.

    Attributes:
        text: the sentence, or a few.
        holds: whether the effect was found; None if the measurement cannot tell.
        ratio: the comparison behind it, if there is one.
    """

    text: str
    holds: bool | None
    ratio: Ratio | None = None

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.text)}</p>"


def speedup(one: Times, many: Times, ranks: int | None = None) -> Verdict:
    """Whether several ranks are faster than one device, and what the difference is made of.

    Args:
        one, many: training runs, of which the epochs after the first are compared, or repeats in
            seconds, of which repeat k of both were taken in turns. Only runs give a reason.
        ranks: P; may be left out for training runs.

    Raises:
        ValueError: no repeats, or no number of ranks.
    """
    if ranks is None and isinstance(many, TrainResult):
        ranks = many.config.world_size
    if ranks is None or ranks < 2:
        raise ValueError(f"ranks is {ranks}: give the number of ranks, 2 or more")
    ratio = _ratio(one, many)
    who = f"{_WORDS.get(ranks, str(ranks))} {'replicas' if _in_one_process(many) else 'ranks'}"
    text = f"{who} were {ratio} as fast as one device ({ratio.spread})"
    if ratio.is_larger is False:
        slower = ratio.inverse
        text = f"{who} took {slower} as long as one device ({slower.spread})"
    if ratio.is_larger is None:
        return Verdict(f"{text}{_undecided(ratio)}.", None, ratio)
    if not (isinstance(one, TrainResult) and isinstance(many, TrainResult)):
        return Verdict(f"{text}.", ratio.is_larger, ratio)
    why = _why(one, many, ranks, ratio)
    return Verdict(f"{text}: {why}." if why else f"{text}.", ratio.is_larger, ratio)


def faster(times: Mapping[str, Times], run: Run | None = None) -> Verdict:
    """Which of several ways is the fastest, compared with the next.

    Args:
        times: by name, training runs or repeats in seconds, taken in turns if equally many.
        run: of the slowest, to name what limited it.

    Raises:
        ValueError: fewer than two names, or no repeats.
    """
    if len(times) < 2:
        raise ValueError(f"got {list(times)}: nothing to compare, give two names or more")
    order = sorted(times, key=lambda name: statistics.median(_seconds(times[name])))
    first, *others = order
    ratios = {name: _ratio(times[name], times[first]) for name in others}
    close = [name for name in others if ratios[name].is_larger is None]
    reason = f" {run.explain()}" if run is not None else ""
    if not close:
        all_others = _compared(ratios, others)
        return Verdict(f"Fastest: {first}, {all_others}.{reason}", True, ratios[others[0]])
    nearest = ratios[close[0]]
    if nearest.has_no_spread:
        return Verdict(
            f"{first}, {_compared(ratios, others)}{_undecided(nearest)}.", None, nearest
        )
    text = f"Cannot be told apart: {first} and {', '.join(close)} ({nearest.spread})."
    if far := [name for name in others if name not in close]:
        text += f" {first} was {_compared(ratios, far)}."
    return Verdict(text, None, nearest)


def _compared(ratios: Mapping[str, Ratio], names: Sequence[str]) -> str:
    each = (f"{ratios[name]} as fast as {name} ({ratios[name].spread})" for name in names)
    return " and ".join(each)


def race(runs: Mapping[str, TrainResult], accuracy: float) -> Verdict:
    """Which training run is first at an accuracy on held-out samples, by the clock of its epochs.

    It is one run each, so the sentence has no spread: repeat with other seeds before you rely on
    it.
    """
    reached = {name: _reached(result, accuracy) for name, result in runs.items()}
    arrived = {name: end for name, end in reached.items() if end is not None}
    never = [name for name in runs if name not in arrived]
    if not arrived:
        return Verdict(f"No run reached {accuracy:.0%}: train longer.", False)
    order = sorted(arrived, key=lambda name: arrived[name][0])
    ends = ", ".join(
        f"{name} after {format_seconds(arrived[name][0])} and "
        f"{format_count(arrived[name][1], 'epoch')}"
        for name in order
    )
    missed = f"; never: {', '.join(never)}" if never else ""
    return Verdict(f"First at {accuracy:.0%}: {ends}{missed}.", True)


def against_model(
    measured: float | Iterable[float],
    model: float,
    unit: str = "s",
    what: str = "the time",
    tolerance: float = 0.1,
    run: Run | None = None,
) -> Verdict:
    """Whether a measurement agrees with a formula: within ``tolerance``, or within the spread.

    A formula within a spread of more than a factor of three is neither confirmed nor refuted.

    Args:
        measured: the repeats.
        model: what the formula gives, above 0.
        unit: of both, see ``units.format_value``.
        what: the quantity.
        tolerance: the largest relative difference that counts as agreement.
        run: the run that was measured, to name what limited it where the two differ.

    Raises:
        ValueError: no repeats, or numbers that are not above 0.
    """
    repeats = as_repeats(measured)
    ratio = Ratio.of(repeats, [model] * len(repeats), paired=True)
    low, median, high = middle(repeats)
    between = f"{format_value(low, unit)} to {format_value(high, unit)} in {len(repeats)} repeats"
    spread = between if len(repeats) > 1 else "measured once"
    text = f"{what[:1].upper()}{what[1:]} was {format_value(median, unit)} ({spread}), and the "
    text += f"model says {format_value(model, unit)}"
    inside = low <= model <= high
    if abs(ratio.median - 1) <= tolerance or (inside and high <= _WIDE * low):
        return Verdict(f"{text}: they agree.", True, ratio)
    if inside:
        return Verdict(f"{text}: the repeats differ too much to compare the two.", None, ratio)
    reason = f" {run.explain()}" if run is not None else ""
    return Verdict(f"{text}: measured is {ratio} the model.{reason}", False, ratio)


def bubble(measured: float | Iterable[float], model: float, run: Run | None = None) -> Verdict:
    """How long the stages were idle, against the formula, which is a lower bound.

    Args:
        measured: shares of the stages' time, 0 to 1, by step.
        model: the formula's share.
        run: the run, whose hops and uneven stages explain the difference.
    """
    low, median, high = middle(as_repeats(measured))
    spread = f"{low:.1%} to {high:.1%} in {format_count(len(as_repeats(measured)), 'step')}"
    text = f"The stages were idle in {median:.1%} of their time ({spread}); the formula says "
    text += f"{model:.1%}"
    if high < model:
        return Verdict(f"{text}, which should be the least: the steps overlap or differ.", False)
    if median - model < 0.02:
        return Verdict(f"{text}, so little else kept them from working.", True)
    limit = run.explain() if run is not None else None
    why = []
    if limit and limit.shares.get(COMMUNICATE, 0) > 0.02:
        why.append(f"hops took {limit.shares[COMMUNICATE]:.0%} of the time")
    if limit and limit.slowdown > 1.1:
        why.append(f"one stage took {format_number(limit.slowdown)} times as long as the other")
    reason = f", likely because {' and '.join(why)}" if why else ""
    return Verdict(f"{text}: {100 * (median - model):.1f} points more{reason}.", False)


def overlap(run: TrainResult | RunResult) -> Verdict:
    """How much of a run's communication was hidden behind computing, or why none was."""
    limit = run.explain()
    spans = run.trace.spans
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        seconds[state_of(span.kind)] += span.duration_s
    if not seconds[COMMUNICATE]:
        return Verdict("No message was recorded, so there was nothing to hide.", None)
    if limit.hidden >= 0.1:
        return Verdict(
            f"{limit.hidden:.0%} of the communication was hidden behind computing.", True
        )
    senders = {(s.rank, s.lane) for s in spans if state_of(s.kind) == COMMUNICATE}
    workers = {(s.rank, s.lane) for s in spans if state_of(s.kind) == COMPUTE}
    few = "No" if limit.hidden < 0.005 else f"Only {limit.hidden:.0%} of the"
    if senders <= workers:
        why = "every thread that sends also computes, and does one after the other"
    else:
        times = format_number(seconds[COMMUNICATE] / seconds[COMPUTE]) if seconds[COMPUTE] else ""
        why = f"messages took {times} times as long as computing" if times else "no rank computed"
        if seconds[COMPUTE] > seconds[COMMUNICATE]:
            why = "the messages began when little computing was left"
    return Verdict(f"{few} communication was hidden behind computing: {why}.", False)


def communication(run: Run) -> Verdict:
    """The share of messages in the ranks' time, and what was sent."""
    limit = run.explain()
    share, waited = limit.shares.get(COMMUNICATE, 0.0), limit.shares.get(WAIT, 0.0)
    text = f"Messages that no computing hid took {share:.0%} of the ranks' time"
    text += f", waiting for each other {waited:.0%}"
    sent = None if isinstance(run, MeasuredSplit) else run.bytes_sent
    if sent and not isinstance(run, MeasuredSplit):
        assert run.messages is not None, "messages and bytes are counted together"
        most = max(range(len(sent)), key=sent.__getitem__)
        text += f"; rank {most} sent most, {format_value(sent[most], 'bytes')} in "
        text += format_count(run.messages[most], "message")
    return Verdict(f"{text}.", share > limit.shares.get(COMPUTE, 0.0))


def staleness(result: TrainResult) -> Verdict:
    """How many updates late the gradients of an asynchronous run were, and whose were latest.

    Raises:
        ValueError: the run was not an asynchronous one.
    """
    updates: Sequence[Sequence[int]] = result.notes.get("staleness", ())
    if not updates:
        raise ValueError(f"{result.config.strategy} counts no staleness: run an asynchronous one")
    late = [late for _, late in updates]
    workers = sorted({worker for worker, _ in updates})
    means = {w: statistics.fmean(s for one, s in updates if one == w) for w in workers}
    latest = max(means, key=means.__getitem__)
    rule = len(workers) - 1
    mean = statistics.fmean(late)
    text = f"A gradient missed {format_number(mean)} updates on average, of {len(updates):,}"
    text += f" (at most {max(late)}); with {format_count(len(workers), 'worker')} the rule says "
    is_near = abs(mean - rule) <= max(0.1 * rule, 0.1)
    text += f"{rule}" + ("" if is_near else ", which holds for long runs")
    if means[latest] > 1.5 * mean:
        text += f". Rank {latest}'s were the latest, {format_number(means[latest])} on average"
    return Verdict(f"{text}.", is_near)


def peak_memory(runs: Mapping[str, Run]) -> Verdict:
    """Which run took the least memory on the rank, or the GPU, that took most of it.

    Args:
        runs: by name, each measured once.

    Raises:
        ValueError: fewer than two names.
    """
    if len(runs) < 2:
        raise ValueError(f"got {list(runs)}: nothing to compare, give two runs or more")
    found = {}
    for name, run in runs.items():
        # A rank that was lost has none.
        by_rank = [(rank, peak) for rank, peak in enumerate(run.peak_memory) if peak]
        peaks = [
            (size, f"rank {rank}" if device == "cpu" else f"rank {rank}, {device}")
            for rank, peak in by_rank
            for device, size in peak.by_device.items()
        ]
        if not peaks or any(peak.largest_bytes is None for _, peak in by_rank):
            text = f"The peak memory of {name} is not known: the system does not say."
            return Verdict(text, None)
        found[name] = max(peaks)
    first, *others = sorted(found, key=lambda name: found[name][0])
    least_bytes, where = found[first]
    text = f"Least peak memory: {first}, {format_value(least_bytes, 'bytes')} on {where}"
    for name in others:
        size, place = found[name]
        times = f"{format_number(size / max(1, least_bytes))} times as much"
        # Runs of the same program differ by some percent: pages, and what the allocator keeps.
        times = times if size > 1.1 * least_bytes else "about as much"
        text += f"; {name} took {times}, {format_value(size, 'bytes')} ({place})"
    return Verdict(f"{text}.", True if found[others[0]][0] > 1.1 * least_bytes else None)


def _seconds(times: Times) -> list[float]:
    """Repeats in seconds; of a training run those of its epochs, without the one that warms up."""
    if not isinstance(times, TrainResult):
        return as_repeats(times)
    seconds = [epoch["seconds"] for epoch in times.epochs]
    return seconds[1:] or seconds


def _ratio(slower: Times, quicker: Times) -> Ratio:
    """How many times as fast the second is; epochs of two runs are no pairs."""
    one, other = _seconds(slower), _seconds(quicker)
    are_runs = isinstance(slower, TrainResult) or isinstance(quicker, TrainResult)
    return Ratio.of(one, other, paired=len(one) == len(other) and not are_runs)


def _undecided(ratio: Ratio) -> str:
    if ratio.has_no_spread:
        return ": repeat it, as one measurement has no spread"
    return ": this measurement cannot tell them apart"


def _why(one: TrainResult, many: TrainResult, ranks: int, ratio: Ratio) -> str:
    """What the time of several ranks is made of, in words; empty if the runs do not show it."""
    alone, mine = _by_state(one), _by_state(many)
    total = sum(mine.values()) or 1.0
    # Servers compute nothing, and are among the ranks of the mean.
    workers = ranks - _servers(many.config)
    who = "each" if workers == ranks else "each worker"
    part = _PARTS.get(workers, f"1/{workers}")
    computed = mine[COMPUTE] * ranks / workers / alone[COMPUTE] if alone[COMPUTE] else 0.0
    if ratio.median > 0.8 * ranks:
        shared = many.config.strategy in _SHARES_SAMPLES and computed < 1.5 / ranks
        return f"each computed {part}" if shared else ""
    losses = {
        COMPUTE: mine[COMPUTE] - alone[COMPUTE] / ranks,
        COMMUNICATE: mine[COMMUNICATE],
        WAIT: mine[WAIT],
    }
    if (limit := many.explain()).kind == "straggler" and not ratio.is_larger:
        slow = format_number(limit.slowdown)
        return f"the likely reason is rank {limit.rank}, which took {slow} times as long as others"
    reasons = {
        COMPUTE: f"{who} had {part} of the samples, and still computed {_times(computed)} as long "
        f"as one device{_sharing(ranks, many)}",
        COMMUNICATE: f"messages took {mine[COMMUNICATE] / total:.0%} of each rank's time",
        WAIT: f"each rank waited {mine[WAIT] / total:.0%} of its time for others",
    }
    if _in_one_process(many):  # its phases are those of the main thread
        reasons[COMMUNICATE] = (
            f"copies took {mine[COMMUNICATE] / total:.0%} of the main thread's time"
        )
        reasons[WAIT] = f"the main thread waited {mine[WAIT] / total:.0%} of its time for others"
    reason = reasons[max(losses, key=losses.__getitem__)]
    return reason if ratio.is_larger else f"the likely reason is that {reason}"


def _servers(config: RunConfig) -> int:
    """How many ranks hold parameters and compute nothing."""
    return (config.servers or 1) if config.strategy.endswith("parameter_server") else 0


def _times(factor: float) -> str:
    return f"{factor:.0%}" if factor < 1 else f"{format_number(factor)} times"


def _sharing(ranks: int, result: TrainResult) -> str:
    cores = result.hardware.get("cores")
    if cores is None or result.hardware.get("gpus"):
        return ""
    if ranks > cores:
        noun = "replicas" if _in_one_process(result) else "ranks"
        return f", as {ranks} {noun} share {format_count(cores, 'core')}"
    return f", which has all {format_count(cores, 'core')} for itself" if cores > 1 else ""


def _in_one_process(run: Times) -> bool:
    """Whether the replicas of a run are threads of one process, so that it has one rank."""
    return isinstance(run, TrainResult) and run.config.strategy == "data_parallel"


def _by_state(result: TrainResult) -> defaultdict[str, float]:
    """Mean seconds of a rank by state, without evaluation."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for kind, spent_s in result.phases_s.items():
        if state_of(kind) != EVALUATE:
            seconds[state_of(kind)] += spent_s
    return seconds


def _reached(result: TrainResult, accuracy: float) -> tuple[float, int] | None:
    """Seconds and epochs until the accuracy was reached; None if it was not."""
    passed_s = 0.0
    for number, epoch in enumerate(result.epochs, start=1):
        passed_s += epoch["seconds"]
        if epoch["test_accuracy"] >= accuracy:
            return passed_s, number
    return None
