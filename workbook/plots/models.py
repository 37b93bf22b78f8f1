"""Two models with sliders on a page, and a run beside one: DDP's buckets, and staleness."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain, cycle
from statistics import fmean

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.costs.async_run import simulate
from labkit.costs.ddp_step import StepModel, predict_step
from labkit.costs.link import Link
from labkit.engine.tracing import Span
from labkit.schedules.bucket_assignment import MIB
from labkit.units import format_bytes, format_count, format_seconds
from workbook.plots.figure import (
    WIDTH_IN,
    CaptionedFigure,
    add_legend,
    add_title,
    drawn,
    fixed_axes,
    label_lanes,
    new_axes,
)
from workbook.plots.palette import BLUE, DARK, SERIES, STYLES, swatch
from workbook.plots.timeline import draw_spans

# Orders of magnitude: seconds to start a message, and seconds per byte.
LINKS = {
    "shared memory": Link(30e-6, 1 / 8e9),
    "100 Gb/s network": Link(15e-6, 1 / 12e9),
    "10 Gb/s network": Link(40e-6, 1 / 1.2e9),
    "1 Gb/s network": Link(60e-6, 1 / 0.12e9),
}
# In MiB; 0 is one bucket per parameter, infinity one bucket for all parameters.
BUCKET_SIZES_MB = (0, 0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100, math.inf)
# A network of 120 layers, each with a weight and a bias: 60 MiB, 60 ms of backward.
_LAYERS = 120
_SIZES = (MIB // 2, 2048) * _LAYERS
# Both gradients of a layer are ready at the same time; those of the last layer are ready first.
_GRADIENT_S = tuple((_LAYERS - index // 2) * 0.5e-3 for index in range(2 * _LAYERS))


def example_step(bucket_mb: float, world_size: int, link: str) -> StepModel:
    """Predict the step that ``bucket_overlap`` draws: 60 MiB of gradients, 60 ms of backward."""
    return predict_step(_SIZES, _GRADIENT_S, bucket_mb * MIB, world_size, LINKS[link])


@drawn
def bucket_overlap(
    bucket_mb: float = 25, world_size: int = 4, link: str = "10 Gb/s network"
) -> CaptionedFigure:
    """Draw ``example_step``: a backward pass with buckets, and below it step time by bucket size.

    Args:
        bucket_mb: MiB of gradients per bucket; 0 is one bucket per parameter, ``math.inf`` one
            bucket for all parameters (except those in the small first bucket).
        world_size: P, at least 2.
        link: one of ``LINKS``.
    """
    step = example_step(bucket_mb, world_size, link)
    sizes = sorted({*BUCKET_SIZES_MB, bucket_mb})
    sweep = {size: example_step(size, world_size, link).step_s for size in sizes}
    figure = Figure(figsize=(WIDTH_IN, 4.6))
    above = fixed_axes(figure, 84, 600, 226, 296)
    below = fixed_axes(figure, 84, 600, 84, 182)
    spans = [Span(0, "compute", 0.0, step.backward_s)]
    if step.exposed_s > 0:
        spans.append(Span(0, "wait", step.backward_s, step.step_s))
    spans += [Span(1, "all_reduce", times.start_s, times.end_s) for times in step.times]
    # The longest step of the sweep sets the scale, so that a slider moves the bars, not the axis.
    above.set_xlim(0, max(sweep.values()) * 1e3)
    add_legend(figure, draw_spans(above, spans, [0, 1], 1e-3, model=True))
    label_lanes(above, ["main thread", "link"])
    above.set_xlabel("time since backward began (ms)")
    # The sizes are at equal distances: 0 and infinity have no logarithm.
    ends = {0: "a\nparameter", math.inf: "all"}
    names = [ends.get(size, f"{size:g}") for size in sizes]
    sweep_ms = [step_s * 1e3 for step_s in sweep.values()]
    backward_ms = step.backward_s * 1e3
    below.plot(names, sweep_ms, color=BLUE, linestyle="--", marker="o", mfc="white")
    below.plot([sizes.index(bucket_mb)], [step.step_s * 1e3], color=BLUE, marker="o", markersize=9)
    below.axhline(backward_ms, color=STYLES["compute"].color, linestyle=":")
    below.annotate("backward alone", (0, backward_ms), (2, 3), textcoords="offset points")
    below.set(xlabel="size of a bucket (MiB)", ylabel="step, predicted (ms)")
    below.set_ylim(0, max(sweep_ms) * 1.1)
    size = size_name(bucket_mb)
    ranks = format_count(world_size, "rank")
    add_title(figure, f"Buckets of {size}, {ranks}, {link} (predicted)")

    exposed = format_seconds(step.exposed_s)
    return CaptionedFigure(
        figure,
        alt=f"Predicted backward pass of {format_seconds(step.backward_s)} on {ranks} over {link},"
        f" buckets of {size}. The first of {len(step.buckets)} all-reduces begins at "
        f"{format_seconds(step.times[0].start_s)}, the last ends at "
        f"{format_seconds(step.times[-1].end_s)}: {exposed} exposed. Below, the predicted step's "
        "time over the size of a bucket.",
        # Which size is best is for the reader to find.
        caption=f"Predicted: buckets of {size} make {len(step.buckets)} all-reduces. They end "
        f"{exposed} after backward, so the step takes {format_seconds(step.step_s)}.",
    )


def size_name(bucket_mb: float) -> str:
    """The size of a bucket in words: ``25 MiB``, ``one parameter`` or ``everything``."""
    if bucket_mb == 0:
        return "one parameter"
    if math.isinf(bucket_mb):
        return "everything"
    return format_bytes(bucket_mb * MIB)


@drawn
def staleness_histogram(
    updates: Sequence[tuple[int, int]],
    *,
    bound: int | None = None,
    title: str = "Staleness of the updates",
) -> CaptionedFigure:
    """Draw the number of updates at each staleness, stacked by worker.

    Args:
        updates: (worker, staleness) of each update, as in ``result.notes["staleness"]``.
        bound: the largest staleness that was allowed, drawn as a line.
    """
    by_worker = _staleness_by_worker(updates)
    figure, axes = new_axes(3.4, title)
    groups = {f"worker {worker}": staleness for worker, staleness in by_worker.items()}
    add_legend(figure, _draw_histogram(axes, groups, bound, model=False))
    staleness = [updates_late for _, updates_late in updates]
    limit = "no bound was set"
    if bound is not None:
        limit = f"the bound was {bound}"
    workers = format_count(len(by_worker), "worker")
    return CaptionedFigure(
        figure,
        alt=f"Histogram of the staleness of {len(staleness):,} updates, stacked by worker. "
        f"{_describe_workers(by_worker)}.",
        caption=f"Mean staleness {fmean(staleness):.2f} with {workers}, "
        f"largest {max(staleness)}; {limit}.",
    )


@drawn
def staleness_model(
    workers: int = 3, factor: float = 4, bound: int | None = None
) -> CaptionedFigure:
    """Draw the model of an asynchronous run: its timeline, above the histogram of staleness.

    Args:
        workers: W; worker 1 is the straggler.
        factor: the straggler takes this many times as long for a gradient, at least 1.
        bound: the largest staleness, W - 1 or more; None allows any.
    """
    # The model's unit of time is one gradient on a worker that is not a straggler.
    free = simulate(workers, factor=factor, duration_s=20.0, bound=bound)
    rounds = simulate(workers, factor=factor, duration_s=20.0, synchronous=True)
    figure = Figure(figsize=(WIDTH_IN, 5.1))
    above = fixed_axes(figure, 64, 600, 224, 334)
    below = fixed_axes(figure, 64, 600, 72, 176)
    above.set_xlim(0, free.duration_s)
    kinds = draw_spans(above, list(free.trace.spans), list(range(workers + 1)), 1.0, model=True)
    label_lanes(above, ["server", *(f"worker {rank}" for rank in range(1, workers + 1))])
    above.set_xlabel("time (gradients of a worker that does not straggle)")
    groups: dict[str, list[int]] = {"the straggler": [], "other workers": []}
    for update in free.updates:
        if update.worker == 1:
            groups["the straggler"].append(update.staleness)
        else:
            groups["other workers"].append(update.staleness)
    add_legend(figure, kinds + _draw_histogram(below, groups, bound, model=True))
    crew = format_count(workers, "worker")
    limit = "no bound"
    if bound is not None:
        limit = f"bound {bound}"
    add_title(figure, f"{crew}, one {factor:g}x straggler, {limit} (predicted)")
    waits = f"{free.waiting_share():.0%} of their time"
    waits_in_rounds = f"{rounds.waiting_share():.0%}"
    largest = max(update.staleness for update in free.updates)
    return CaptionedFigure(
        figure,
        alt=f"Predicted timeline of a server and {crew}, worker 1 {factor:g} times as slow, "
        f"{limit}: workers wait {waits}. Below, predicted staleness. "
        f"{_describe_workers(_staleness_by_worker(free.updates))}.",
        caption=f"Predicted: staleness {free.mean_staleness():.1f} on average and at most "
        f"{largest}, {limit}. {len(free.updates)} gradients are applied while synchronous rounds "
        f"apply {len(rounds.updates)}; workers wait {waits} instead of {waits_in_rounds}.",
    )


def _draw_histogram(
    axes: Axes, groups: dict[str, list[int]], bound: int | None, model: bool
) -> list[Artist]:
    """Staleness by group as stacked bars; returns the legend's entries."""
    looks = SERIES
    if model:
        # They differ from those of the spans above it.
        looks = SERIES[3:5]
    entries: list[Artist] = []
    largest = max(bound or 0, *chain(*groups.values()))
    bottoms = np.zeros(largest + 1)
    for (name, staleness), (style, *_) in zip(groups.items(), cycle(looks)):
        heights = np.bincount(staleness, minlength=largest + 1)
        look = style.model if model else style
        axes.bar(range(largest + 1), heights, 0.8, bottoms, **look.fill)
        bottoms += heights
        entries.append(swatch(name, style, model))
    if bound is not None:
        axes.axvline(bound + 0.5, color=DARK, linestyle="--")
        # At the upper end of the line, above the axes.
        end = axes.get_xaxis_transform()
        axes.text(bound + 0.5, 1.01, f"bound {bound}", transform=end, va="bottom", ha="right")
    axes.set(xlabel="staleness (updates by others between pull and update)", ylabel="updates")
    axes.set_xlim(-0.6, largest + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    return entries


def _staleness_by_worker(updates: Iterable[Sequence[int]]) -> dict[int, list[int]]:
    by_worker: dict[int, list[int]] = {}
    for worker, staleness in updates:
        by_worker.setdefault(worker, []).append(staleness)
    return dict(sorted(by_worker.items()))


def _describe_workers(by_worker: dict[int, list[int]]) -> str:
    parts = []
    for worker, staleness in by_worker.items():
        updates = format_count(len(staleness), "update")
        mean = f"mean staleness {fmean(staleness):.1f}"
        parts.append(f"worker {worker}: {updates}, {mean}, largest {max(staleness)}")
    return "; ".join(parts)
