"""Explorers: a figure of ``workbook.plots``, with controls for its arguments."""

import math
from collections.abc import Callable

import ipywidgets

from labkit.costs.pipeline_timeline import predicted_slots
from labkit.schedules.pipeline import PIPELINES, pipeline_streams
from labkit.training.measured import MeasuredSplit
from workbook import plots
from workbook.plots.models import BUCKET_SIZES_MB, LINKS, size_name
from workbook.widgets.explorer import Explorer

MICRO_BATCHES = (1, 2, 4, 8, 16)


def bucket_explorer(bucket_mb: float = 25, world_size: int = 4) -> Explorer:
    """Explore the prediction of a backward pass with buckets; ``plots.bucket_overlap`` draws it.

    Args:
        bucket_mb: MiB to start with, one of ``BUCKET_SIZES_MB``; the control ``size``.
        world_size: ranks to start with, 2 to 16; the control ``ranks``.
    """
    sizes = [(size_name(size), size) for size in BUCKET_SIZES_MB]
    return Explorer(
        plots.bucket_overlap,
        size=ipywidgets.SelectionSlider(options=sizes, value=bucket_mb, description="bucket"),
        ranks=ipywidgets.IntSlider(world_size, 2, 16, description="ranks"),
        link=ipywidgets.Dropdown(options=list(LINKS), value="10 Gb/s network", description="link"),
    )


def ring_stepper(world_size: int = 4) -> Explorer:
    """Step through a ring all-reduce: what each rank holds after a step, and what has just moved.

    The controls are ``step`` and ``ranks``. ``plots.ring_step`` draws the same figure.

    Args:
        world_size: the number of ranks to start with, 2 to 6. A change keeps the step if the new
            ring has that step.
    """
    step = ipywidgets.IntSlider(0, 0, 2 * (world_size - 1), description="step")
    ranks = ipywidgets.IntSlider(world_size, 2, 6, description="ranks")

    def adjust() -> None:
        step.max = 2 * (ranks.value - 1)

    return Explorer(plots.ring_step, adjust, step=step, ranks=ranks)


def staleness_explorer(workers: int = 3, factor: int = 4) -> Explorer:
    """Explore the prediction of an asynchronous run; ``plots.staleness_model`` draws it.

    The controls are ``workers``, ``factor`` and ``bound``.

    Args:
        workers: W to start with, 2 to 6. A change moves the range of ``bound``, and a bound
            outside the new range with it.
        factor: how many times as long the straggler computes, to start with: 1 to 8.
    """
    crew = ipywidgets.IntSlider(workers, 2, 6, description="workers")
    straggler = ipywidgets.IntSlider(factor, 1, 8, description="straggler")
    bounds = _bounds(workers)
    limit = ipywidgets.SelectionSlider(options=bounds, value=math.inf, description="bound")

    def adjust() -> None:
        bounds = _bounds(crew.value)
        chosen = limit.value
        if limit.options == bounds:
            return
        limit.options = bounds
        if chosen != math.inf:
            (_, least), *_, (_, most), _ = bounds
            chosen = min(max(chosen, least), most)
        limit.value = chosen

    def draw(workers: int, factor: int, bound: float) -> plots.CaptionedFigure:
        return plots.staleness_model(workers, factor, None if bound == math.inf else int(bound))

    return Explorer(draw, adjust, workers=crew, factor=straggler, bound=limit)


def _bounds(workers: int) -> tuple[tuple[str, float], ...]:
    """The bound's slider for W workers: W - 1, the least possible, and more; infinity is none."""
    bounds = [(str(bound), bound) for bound in range(workers - 1, workers + 11)]
    return (*bounds, ("none", math.inf))


def pipeline_explorer(
    stages: int,
    forward_s: Callable[[int], float],
    measure: Callable[..., MeasuredSplit],
) -> Explorer:
    """Choose micro-batches and a schedule, see the step predicted, and run it.

    The controls are ``count`` and ``schedule``; ``plots.pipeline_timetable`` draws the prediction,
    ``plots.pipeline_timeline`` the run.

    Args:
        stages: P, equal ones.
        forward_s: seconds of a stage's forward of one micro-batch, by M; backward takes twice.
        measure: what Run calls, with ``micro_batches`` and ``schedule``.
    """
    count = ipywidgets.SelectionSlider(options=MICRO_BATCHES, value=4, description="micro-batches")
    count.style.description_width = "initial"
    of_one_stage = [name for name, schedule in PIPELINES.items() if not schedule.interleaves]
    order = ipywidgets.Dropdown(options=of_one_stage, description="schedule")

    def draw(count: int, schedule: str) -> plots.CaptionedFigure:
        streams = pipeline_streams(schedule, stages, count)
        seconds = forward_s(count)
        slots = predicted_slots(streams, [seconds] * stages, [2 * seconds] * stages)
        return plots.pipeline_timetable(slots, title=f"{schedule}, micro-batches: {count}")

    def measured(count: int, schedule: str) -> plots.CaptionedFigure:
        step = measure(micro_batches=count, schedule=schedule).typical_step()
        title = f"{schedule}, micro-batches: {count}, as it ran"
        return plots.pipeline_timeline(
            step, pipeline_streams(schedule, stages, count), title=title
        )

    explorer = Explorer(draw, count=count, schedule=order)
    explorer.add_run_button("measuring ...", measured)
    return explorer
