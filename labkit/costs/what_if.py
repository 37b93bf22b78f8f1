"""The what-if: a recorded run as it would be over another link, with a straggler, on more ranks.

The computing is that of the recorded run, the schedule too (``labkit.costs.replay``); messages
cost what the link's formula says, and waiting follows from both.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.costs.link import Link
from labkit.costs.more_ranks import on_ranks
from labkit.costs.replay import Network, Replay, lanes_of
from labkit.engine.comm.emulated_link import check_link
from labkit.engine.tracing.limits import Limit, what_limited
from labkit.engine.tracing.spans import Trace
from labkit.units import MOST_RANKS, check_above_zero, check_integer, format_number, format_seconds

# Why the order of messages of these techniques is not that of the recorded run.
_REFUSED = {
    "async_parameter_server": "whose push comes first depends on the seconds that would change",
    "data_parallel": "its replicas are threads of one process, which send no messages",
}


@dataclass(frozen=True)
class WhatIf:
    """A recorded run beside the same run under other conditions; prints as sentences.

    Attributes:
        conditions: what was changed, in words.
        recorded, predicted: the two timelines; the second is no measurement.
        recorded_s, predicted_s: seconds of a training step, the median; of the whole trace if it
            has no steps (``unit`` is then ``in all``).
    """

    conditions: str
    recorded: Trace = field(repr=False)
    predicted: Trace = field(repr=False)
    recorded_s: float
    predicted_s: float
    unit: str

    @property
    def ratio(self) -> float:
        """Predicted seconds divided by recorded ones."""
        return self.predicted_s / self.recorded_s if self.recorded_s else math.inf

    def explain(self) -> Limit:
        """The limit of the predicted steps, as ``what_limited`` names it."""
        return what_limited(_steps(self.predicted), gap="idle time")

    def beside(self, run: Any) -> str:
        """A sentence: the prediction's error against ``run``, made under these conditions."""
        trace = getattr(run, "trace", run)
        run_s, unit = _seconds(trace)
        if unit != self.unit or not run_s:
            raise ValueError(
                f"the prediction is of the seconds {self.unit}, and the run has {run_s:g} s {unit}"
            )
        error = self.predicted_s / run_s - 1
        direction = "long" if error > 0 else "short"
        after = f"Run: {format_seconds(run_s)} {self.unit}; "
        after += f"the prediction is {abs(error):.0%} too {direction}."
        return f"{after} {what_limited(_steps(trace))}"

    def __str__(self) -> str:
        before = f"Recorded: {format_seconds(self.recorded_s)} {self.unit}."
        times = f"{format_number(self.ratio)} times"
        if times == "1 times":
            times = "just"
        after = f"Predicted {self.conditions}: {format_seconds(self.predicted_s)} {self.unit}, "
        after += f"{times} as long."
        return f"{before} {what_limited(_steps(self.recorded))}\n{after} {self.explain()}"


def what_if(
    run: Any,
    *,
    link: Any = None,
    stragglers: Mapping[int, float] | None = None,
    ranks: int | None = None,
) -> WhatIf:
    """Predict a recorded run over another link, with slow ranks, or on another number of ranks.

    Args:
        run: the result of ``labkit.run``, of ``labkit.train_with``, or its trace (of all ranks).
        link: an ``EmulatedLink``; None leaves the recorded run's.
        stragglers: by rank, how many times as long it computes.
        ranks: the number of ranks, each with a core or device of its own, of a technique that
            divides the batch and sums gradients on a ring. ``stragglers`` are among these.

    Raises:
        ValueError: what cannot be predicted, and why.
    """
    trace = getattr(run, "trace", run)
    if not isinstance(trace, Trace):
        raise ValueError(f"run must be a run's result or its trace, got a {type(run).__name__}")
    _check(trace)
    check_link(link)
    network = None
    if trace.about.get("link"):
        network = _network(**trace.about["link"])
    num_ranks = len(trace.ranks)
    conditions = []
    if ranks is not None:
        check_integer("ranks", ranks, 2, MOST_RANKS)
        lanes = on_ranks(trace, ranks, network)
        num_ranks = ranks
        conditions.append(f"on {ranks} ranks")
    else:
        lanes = lanes_of(trace, network)
    if link is not None:
        network = _network(link.latency_s, link.bandwidth_bytes_per_s, link.ranks_per_host)
        conditions.append(f"over a link of {network}")
    factors = dict(stragglers or {})
    for rank, factor in factors.items():
        check_integer("the rank of a straggler", rank, 0, num_ranks - 1)
        check_above_zero("the factor of a straggler", factor, 1e6)
        conditions.append(f"with rank {rank} computing {format_number(factor)} times as long")
    words = " and ".join(conditions) or "with nothing changed"
    spans = Replay(lanes, network, factors).run()
    # A step of local SGD is a part of a round here, too.
    about = {"predicted": words, "average_every": trace.about.get("average_every")}
    predicted = Trace.merge([spans], about=about)
    recorded_s, unit = _seconds(trace)
    predicted_s, _ = _seconds(predicted)
    return WhatIf(words, trace, predicted, recorded_s, predicted_s, unit)


def _network(
    latency_s: float, bandwidth_bytes_per_s: float | None, ranks_per_host: int | None
) -> Network:
    return Network(Link(latency_s, 1 / (bandwidth_bytes_per_s or math.inf)), ranks_per_host)


def _step_starts(trace: Trace) -> list[float]:
    """Seconds at which the last rank begins each training step: loading its data begins it."""
    starts_s = []
    for rank in trace.ranks:
        starts_s.append([span.start_s for span in trace.of(rank, "data", lane=0)])
    # A rank without work, such as a server, may load no data.
    return [max(at_s) for at_s in zip(*filter(None, starts_s))]


def _steps(trace: Trace) -> Trace:
    """The trace without what comes before the first step, such as sending the parameters."""
    starts_s = _step_starts(trace)
    if len(starts_s) < 2:
        return trace
    return trace.between(starts_s[0], math.inf)


def step_seconds(trace: Trace) -> float | None:
    """Median seconds from one training step's start on the last rank to the next one's.

    None for fewer than two steps. Of local SGD, which has messages in one of K steps, it is a
    K-th of the median round.
    """
    last_s = _step_starts(trace)
    if len(last_s) < 2:
        return None
    num_steps = min(trace.about.get("average_every") or 1, len(last_s) - 1)
    rounds_s = [end_s - start_s for start_s, end_s in zip(last_s, last_s[num_steps:])]
    return statistics.median(rounds_s) / num_steps


def _seconds(trace: Trace) -> tuple[float, str]:
    """The seconds of a training step; without steps, of the whole trace."""
    step_s = step_seconds(trace)
    if step_s is not None:
        return step_s, "a step"
    ends_s = [span.end_s for span in trace.spans]
    return max(ends_s) - min(span.start_s for span in trace.spans), "in all"


def _check(trace: Trace) -> None:
    """Raise ValueError for a trace that cannot be played again."""
    about = trace.about
    if "predicted" in about:
        raise ValueError(f"the trace is a prediction, {about['predicted']}: give the recorded one")
    if trace.apart:
        raise ValueError(
            "the trace is from PyTorch's profiler, which records neither the bytes of a message "
            "nor who waits for whom: record the run with labkit, and save its result's trace"
        )
    technique = about.get("strategy", "")
    if technique in _REFUSED:
        raise ValueError(f"a run of {technique} cannot be predicted: {_REFUSED[technique]}")
    if about.get("builtin"):
        raise ValueError("the messages of PyTorch's own techniques are not recorded")
    if len(trace.ranks) < 2:
        raise ValueError("the trace is of one rank, which waits for nobody: give that of a run")
    if not any(span.messages and span.num_bytes for span in trace.spans):
        raise ValueError(
            "the trace does not say which message is which, so it is of an older labkit: record "
            "the run again. Or the run has no messages but those of process groups, which are "
            "not recorded"
        )
    known_ranks = {-1, *trace.ranks}
    for span in trace.spans:
        for src, dst, _ in span.messages:
            absent = {src, dst} - known_ranks
            if absent:
                raise ValueError(f"the trace has no spans of rank {absent.pop()}: give all ranks'")
        if span.kind == "between_hosts":
            raise ValueError(
                "the hierarchical all-reduce moves messages while others move, and the trace does "
                "not say since when: record the run without hierarchical"
            )
        if span.lane and span.call is None:
            raise ValueError(
                f"rank {span.rank} has a span, {span.kind}, in a thread of which the trace does "
                "not say who called it and when (on a GPU it never does)"
            )
