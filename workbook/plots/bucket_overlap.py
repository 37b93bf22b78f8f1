"""A model of DDP's buckets: a backward pass, its all-reduces, and the step time by bucket size."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.costs.ddp_step import StepModel, predict_step
from labkit.costs.link import Link
from labkit.schedules.bucket_assignment import MIB
from labkit.tracing import Span
from labkit.units import check_choice, format_bytes, format_count, format_seconds
from workbook.plots.figure import (
    WIDTH_IN,
    CaptionedFigure,
    add_legend,
    add_title,
    drawn,
    fixed_axes,
    label_lanes,
)
from workbook.plots.palette import BLUE, STYLES, swatch
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
_LAYER_S = 0.5e-3
# Both gradients of a layer are ready at the same time; those of the last layer are ready first.
_GRADIENT_S = tuple((_LAYERS - index // 2) * _LAYER_S for index in range(2 * _LAYERS))


def example_step(bucket_mb: float, world_size: int, link: str) -> StepModel:
    """Predict the step that ``bucket_overlap`` draws: 60 MiB of gradients, 60 ms of backward.

    Args:
        bucket_mb, world_size, link: as in ``bucket_overlap``.

    Raises:
        ValueError: an unknown link, fewer than 2 ranks, a negative size.
    """
    check_choice("link", link, LINKS)
    if world_size < 2:
        raise ValueError(f"one rank sends nothing: world_size must be 2 or more, got {world_size}")
    if not bucket_mb >= 0:
        raise ValueError(
            f"bucket_mb must be 0 (one bucket per parameter) or more, got {bucket_mb!r}"
        )
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

    Raises:
        ValueError: an unknown link, fewer than 2 ranks, a negative size.
    """
    step = example_step(bucket_mb, world_size, link)
    sweep = [example_step(size, world_size, link).step_s for size in BUCKET_SIZES_MB]
    figure = Figure(figsize=(WIDTH_IN, 4.6))
    above = fixed_axes(figure, 84, 600, 226, 296)
    spans = [Span(0, "compute", 0.0, step.backward_s)]
    if step.exposed_s > 0:
        spans.append(Span(0, "wait", step.backward_s, step.step_s))
    spans += [Span(1, "all_reduce", times.start_s, times.end_s) for times in step.times]
    # The longest step of the sweep sets the scale, so that a slider moves the bars, not the axis.
    above.set_xlim(0, max(*sweep, step.step_s) * 1e3)
    draw_spans(above, spans, [0, 1], 1e-3, model=True)
    label_lanes(above, ["main thread", "link"])
    above.set_xlabel("time since backward began (ms)")
    _draw_sweep(fixed_axes(figure, 84, 600, 84, 182), step, sweep, bucket_mb)
    size, ranks = size_name(bucket_mb), format_count(world_size, "rank")
    add_title(figure, f"Buckets of {size}, {ranks}, {link} (model)")
    names = {"compute": "backward", "all_reduce": "all-reduce of a bucket", "wait": "exposed"}
    add_legend(figure, [swatch(name, STYLES[kind], model=True) for kind, name in names.items()])

    exposed, takes = format_seconds(step.exposed_s), format_seconds(step.step_s)
    best, best_mb = min(zip(sweep, BUCKET_SIZES_MB))
    others = f"With {size_name(best_mb)} it would take {format_seconds(best)}."
    if step.step_s <= best * (1 + 1e-9):
        others = "No other size on the curve is faster."
    alt = (
        f"Predicted backward pass of {format_seconds(step.backward_s)} on {ranks} over {link}, "
        f"buckets of {size}. The first of {len(step.buckets)} all-reduces begins at "
        f"{format_seconds(step.times[0].start_s)}, the last ends at "
        f"{format_seconds(step.times[-1].end_s)}: {exposed} exposed. Below, the predicted step's "
        "time over the size of a bucket."
    )
    caption = (
        f"Model: buckets of {size} make {len(step.buckets)} all-reduces. They end {exposed} after "
        f"backward, so the step takes {takes}. {others}"
    )
    return CaptionedFigure(figure, alt=alt, caption=caption)


def size_name(bucket_mb: float) -> str:
    """The size of a bucket in words: ``25 MiB``, ``one parameter`` or ``everything``."""
    if bucket_mb == 0:
        return "one parameter"
    return "everything" if math.isinf(bucket_mb) else format_bytes(bucket_mb * MIB)


def _draw_sweep(axes: Axes, step: StepModel, sweep: list[float], bucket_mb: float) -> None:
    """Draw step time by bucket size, the sizes at equal distances: 0 and inf have no logarithm."""
    places, sweep_ms = range(len(sweep)), [s * 1e3 for s in sweep]
    axes.plot(places, sweep_ms, color=BLUE, linestyle="--", marker="o", mfc="white")
    axes.axhline(step.backward_s * 1e3, color=STYLES["compute"].color, linestyle=":")
    axes.annotate("backward alone", (0, step.backward_s * 1e3), (2, 3), textcoords="offset points")
    if bucket_mb in BUCKET_SIZES_MB:
        place = BUCKET_SIZES_MB.index(bucket_mb)
        axes.plot([place], [step.step_s * 1e3], color=BLUE, marker="o", markersize=9)
    names = {0: "a\nparameter", math.inf: "all"}
    axes.set_xticks(list(places), [names.get(size, f"{size:g}") for size in BUCKET_SIZES_MB])
    axes.set_ylim(0, max(sweep) * 1.1e3)
    axes.set(xlabel="size of a bucket (MiB)", ylabel="step, model (ms)")
