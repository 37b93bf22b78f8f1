"""The timetable of a pipeline step, as predicted and as measured in a real run.

Symbols: P stages, M micro-batches.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.costs.pipeline_timeline import Slot, bubble, bubble_formula
from labkit.schedules.pipeline import Action, in_flight
from labkit.tracing import Span, Trace
from labkit.units import format_count, format_number, format_seconds, second_unit
from workbook.plots.figure import (
    WIDTH_PX,
    CaptionedFigure,
    add_legend,
    drawn,
    label_lanes,
    new_axes,
)
from workbook.plots.lane_names import device_words, lane_names, memory_words, peaks_of
from workbook.plots.timeline import draw_spans, joined, tag, trace_of

Streams = Sequence[Sequence[Action]]


@drawn
def pipeline_timetable(
    slots: Sequence[Slot], *, title: str | None = None, unit: str | None = None
) -> CaptionedFigure:
    """Draw a predicted pipeline step: one row per stage, one numbered box per forward or backward.

    Args:
        slots: from ``labkit.costs.pipeline_timeline.predicted_slots`` or ``SplitModel.slots``.
        title: above the figure.
        unit: of the slots' times, if they are not seconds (``"forwards of a micro-batch"``).

    Raises:
        ValueError: no slots.
    """
    if not slots:
        raise ValueError(
            "no slots to draw: give the predicted_slots(...) of a schedule "
            "(labkit.costs.pipeline_timeline)"
        )
    title = f"{title or 'Timetable of a step'} (model)"
    spans = [Span(slot.stage, slot.kind, slot.start_s, slot.end_s) for slot in slots]
    return _captioned([*spans, *_idle(slots)], slots, title, unit, model=True)


@drawn
def pipeline_timeline(
    result: Any, streams: Streams, *, step: int = -1, title: str | None = None
) -> CaptionedFigure:
    """Draw one step of a real run like its timetable: what each stage did, in numbered boxes.

    Args:
        result, streams, step: as in ``measured_slots``.
        title: above the figure.

    Raises:
        ValueError: as ``measured_slots``.
    """
    slots = measured_slots(result, streams, step=step)
    start_s, end_s = min(slot.start_s for slot in slots), max(slot.end_s for slot in slots)
    # A span too short to be seen should not add an entry to the legend.
    least_s = (end_s - start_s) / 5000
    clipped = (
        Span(s.rank, s.kind, max(s.start_s, start_s) - start_s, min(s.end_s, end_s) - start_s)
        for s in trace_of(result).of(lane=0)
        if s.rank < len(streams)
    )
    spans = [span for span in clipped if span.duration_s > least_s]
    spans += _after_the_last(spans, end_s - start_s)
    shown = [s._replace(start_s=s.start_s - start_s, end_s=s.end_s - start_s) for s in slots]
    trace, peaks, stages = trace_of(result), peaks_of(result), range(len(streams))
    captioned = _captioned(spans, shown, title or "A step as it ran", None, model=False)
    axis, names = lane_names(trace, stages, peaks)
    axes = captioned.figure.axes[0]
    axes.set_ylabel(axis.replace("rank", "stage"))
    label_lanes(axes, names)
    said = joined(device_words(trace, stages), memory_words(peaks, "stage"))
    alt, caption = joined(captioned.alt, said), joined(captioned.caption, said)
    return CaptionedFigure(captioned.figure, alt=alt, caption=caption)


def measured_slots(result: Any, streams: Streams, *, step: int = -1) -> list[Slot]:
    """One step of a real run as a timetable, for ``labkit.costs.pipeline_timeline.bubble``.

    In each step, a rank's k-th forward span is the k-th forward of its stream, and likewise for
    backward.

    Args:
        result: a ``Trace``, or a result that has one as ``.trace``; rank s is stage s.
        streams: by stage, the actions that it ran in each step, in order.
        step: which of the steps in the trace, the last one by default.

    Raises:
        ValueError: the forwards and backwards of a rank are not repeats of its stream, or the
            trace has no such step.
    """
    trace = trace_of(result)
    steps = [_steps_of(trace, stage, list(stream)) for stage, stream in enumerate(streams)]
    counts = {len(mine) for mine in steps}
    if len(counts) > 1 or not -max(counts) <= step < max(counts):
        raise ValueError(
            f"there is no step {step}: in this trace, the stages ran "
            f"{' or '.join(map(str, sorted(counts)))} steps"
        )
    return [slot for mine in steps for slot in mine[step]]


def _steps_of(trace: Trace, stage: int, stream: list[Action]) -> list[list[Slot]]:
    """By step, the slots of one stage."""
    spans = [s for s in trace.of(stage, lane=0) if s.kind in ("forward", "backward")]
    steps, rest = divmod(len(spans), len(stream))
    actions = stream * steps
    if rest or not steps or [span.kind for span in spans] != [a.kind for a in actions]:
        raise ValueError(
            f"rank {stage} ran {len(spans)} forwards and backwards, which are not repeats of its "
            f"stream's {len(stream)}: give the streams of this run, and a trace of whole steps "
            "whose batches all have the same number of micro-batches"
        )
    slots = [
        Slot(stage, *action, span.start_s, span.end_s) for action, span in zip(actions, spans)
    ]
    return [slots[first : first + len(stream)] for first in range(0, len(slots), len(stream))]


def _idle(slots: Sequence[Slot]) -> list[Span]:
    """The gaps between a stage's slots, from the step's start to its end."""
    end_s = max(slot.end_s for slot in slots)
    found = []
    for stage, mine in _by_stage(slots).items():
        edges = [0.0, *(time for slot in mine for time in (slot.start_s, slot.end_s)), end_s]
        gaps = zip(edges[::2], edges[1::2])
        found += [Span(stage, "wait", low, high) for low, high in gaps if high > low]
    return found


def _after_the_last(spans: list[Span], end_s: float) -> list[Span]:
    """A stage that is done waits for the end of the step, also where the trace ends before."""
    last_s = {span.rank: span.end_s for span in sorted(spans, key=lambda span: span.end_s)}
    return [Span(rank, "wait", at, end_s) for rank, at in last_s.items() if at < end_s]


def _by_stage(slots: Sequence[Slot]) -> dict[int, list[Slot]]:
    """By stage, its slots in order."""
    stages = sorted({slot.stage for slot in slots})
    by_start = sorted(slots, key=lambda slot: slot.start_s)
    return {stage: [slot for slot in by_start if slot.stage == stage] for stage in stages}


def _captioned(
    spans: list[Span], slots: Sequence[Slot], title: str, unit: str | None, model: bool
) -> CaptionedFigure:
    stages = format_count(len(_by_stage(slots)), "stage")
    batches = format_count(len({slot.micro_batch for slot in slots}), "micro-batch")
    length = max(slot.end_s for slot in slots) - min(slot.start_s for slot in slots)
    takes = f"{format_number(length)} {unit}" if unit else format_seconds(length)
    words = f"the step takes {takes}, and stages are idle for {bubble(slots):.0%} of it"
    name, source = ("Predicted timetable", "Model") if model else ("Timeline", "Measured")
    return CaptionedFigure(
        _draw_rows(spans, slots, title, unit, model),
        alt=f"{name} of {stages} and {batches}. {_orders(slots)}. In all, {words}.",
        caption=f"{source}: {words}. {_bubble_words(slots)}",
    )


def _draw_rows(
    spans: list[Span], slots: Sequence[Slot], title: str, unit: str | None, model: bool
) -> Figure:
    """One row per stage from 0 to the end of the step; ``slots`` number the boxes."""
    stages, end_s = list(_by_stage(slots)), max(span.end_s for span in spans)
    scale, unit = (1.0, unit) if unit else second_unit(end_s / 2)
    figure, axes = new_axes(1.5 + 0.45 * len(stages), title)
    axes.set_xlim(0, end_s / scale)
    entries = draw_spans(axes, spans, stages, scale, model, "idle" if model else "wait")
    label_lanes(axes, [str(stage) for stage in stages])
    for slot in slots:
        _write_number(axes, slot, stages.index(slot.stage), scale, end_s)
    axes.set(xlabel=f"time ({unit})", ylabel="stage")
    add_legend(figure, entries)
    return figure


def _write_number(axes: Axes, slot: Slot, row: int, scale: float, end_s: float) -> None:
    """Write ``F3`` into the box, or ``3``, or nothing, whichever fits its width."""
    pixels = (slot.end_s - slot.start_s) / end_s * (WIDTH_PX - 60)
    name = str(Action(slot.kind, slot.micro_batch))
    for text in (name, name[1:]):
        if pixels > 8 * len(text) + 6:
            middle = (slot.start_s + slot.end_s) / 2 / scale
            tag(axes, middle, row, text, pad=0.15)
            return


def _orders(slots: Sequence[Slot]) -> str:
    """What each stage does, in order; of many actions, the first twelve."""
    parts = []
    for stage, mine in _by_stage(slots).items():
        names = [str(Action(slot.kind, slot.micro_batch)) for slot in mine]
        more = " and so on" if len(names) > 12 else ""
        parts.append(f"stage {stage} {' '.join(names[:12])}{more}")
    return "; ".join(parts)


def _bubble_words(slots: Sequence[Slot]) -> str:
    """The formula for the bubble, and the number of micro-batches whose activations are held."""
    by_stage = _by_stage(slots)
    count = len({slot.micro_batch for slot in slots})
    formula = bubble_formula(len(by_stage), count)
    held = [in_flight(Action(s.kind, s.micro_batch) for s in mine) for mine in by_stage.values()]
    return (
        f"Equal stages without hops would be idle for (P - 1) / (M + P - 1) = {formula:.0%}. "
        f"Activations of at most {', '.join(map(str, held))} micro-batches are held, by stage."
    )
