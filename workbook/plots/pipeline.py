"""A pipeline's step as predicted and as it ran, and its time by the number of micro-batches.

Symbols: P stages, M micro-batches.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from labkit.costs.pipeline_timeline import Slot, bubble, bubble_formula
from labkit.engine.tracing import Span, Trace
from labkit.schedules.pipeline import LETTERS, Action, in_flight
from labkit.units import as_repeats, format_count, format_number, format_seconds, second_unit
from workbook.plots.figure import (
    WIDTH_PX,
    CaptionedFigure,
    add_legend,
    drawn,
    joined,
    label_lanes,
    new_axes,
)
from workbook.plots.size_curves import draw_curves
from workbook.plots.timeline import draw_spans, tag

# A narrower box has no label.
_LEAST_PX = 9


@drawn
def pipeline_timetable(
    slots: Sequence[Slot], *, title: str = "Timetable of a step", unit: str | None = None
) -> CaptionedFigure:
    """Draw a predicted pipeline step: one row per stage, one numbered box per forward or backward.

    Where a row is empty, the stage is idle.

    Args:
        slots: from ``labkit.costs.pipeline_timeline.predicted_slots`` or ``SplitModel.slots``.
        unit: of the slots' times, if they are not seconds (``"forwards of a micro-batch"``).
    """
    spans = [Span(slot.rank, slot.kind, slot.start_s, slot.end_s) for slot in slots]
    return _draw(spans, slots, f"{title} (predicted)", unit, model=True)


@drawn
def pipeline_timeline(
    trace: Trace, streams: Sequence[Sequence[Action]], *, title: str = "A step as it ran"
) -> CaptionedFigure:
    """Draw one step of a real run like its timetable: what each stage did, in numbered boxes.

    Args:
        trace: of one step, such as ``measure_split(...).typical_step()``; rank s is stage s.
        streams: by stage, the actions that it ran, in order.

    Raises:
        ValueError: the forwards and backwards of a rank are not those of its stream.
    """
    compute_spans = [span for span in trace.of(lane=0) if span.kind in LETTERS]
    start_s = min((span.start_s for span in compute_spans), default=0.0)
    end_s = max((span.end_s for span in compute_spans), default=0.0)
    slots = []
    for stage, stream in enumerate(streams):
        spans = [span for span in compute_spans if span.rank == stage]
        if [span.kind for span in spans] != [action.kind for action in stream]:
            raise ValueError(
                f"rank {stage} ran {len(spans)} forwards and backwards, which are not the "
                f"{len(stream)} of its stream: give the streams of this run"
            )
        for (kind, micro_batch, chunk), span in zip(stream, spans):
            times = (span.start_s - start_s, span.end_s - start_s)
            slots.append(Slot(stage, kind, micro_batch, *times, chunk))
    spans = []
    for span in trace.between(start_s, end_s).of(lane=0):
        spans.append(Span(span.rank, span.kind, span.start_s - start_s, span.end_s - start_s))
    return _draw(spans, slots, title, None, model=False)


def _draw(
    spans: list[Span], slots: Sequence[Slot], title: str, unit: str | None, model: bool
) -> CaptionedFigure:
    """One row per stage from 0 to the end of the step; ``slots`` number the boxes."""
    stages = sorted({slot.rank for slot in slots})
    chunks = 1 + max(slot.chunk for slot in slots)
    count = len({slot.micro_batch for slot in slots})
    end_s = max(slot.end_s for slot in slots)
    scale, shown_unit = (1.0, unit) if unit else second_unit(end_s / 2)
    figure, axes = new_axes(1.5 + 0.45 * len(stages), title)
    # A little more than the step, so that the last box has its right edge.
    axes.set_xlim(0, 1.003 * end_s / scale)
    entries = draw_spans(axes, spans, stages, scale, model)
    for slot in slots:
        # ``F3``, or ``3``, or ``F3`` from bottom to top, or nothing: what fits with as many digits
        # as the last one has.
        pixels = (slot.end_s - slot.start_s) / end_s * (WIDTH_PX - 60)
        room = int((pixels - 6) / 8) - len(str(count - 1))
        text = str(Action(slot.kind, slot.micro_batch, slot.chunk))
        middle = (slot.start_s + slot.end_s) / 2 / scale
        if room == 0:
            text = text[1:]
        if room >= 0:
            tag(axes, middle, stages.index(slot.rank), text)
        elif pixels >= _LEAST_PX:
            tag(axes, middle, stages.index(slot.rank), text, rotation=90, fontsize="x-small")
    row = "stage" if chunks == 1 else "rank"
    axes.set(xlabel=f"time ({shown_unit})", ylabel=row)
    label_lanes(axes, list(map(str, stages)))
    add_legend(figure, entries)

    orders = []
    held = []
    for stage in stages:
        actions = _actions_of(stage, slots)
        order = " ".join(map(str, actions[:12]))
        if len(actions) > 12:
            order += " and so on"
        orders.append(f"{row} {stage} {order}")
        held.append(format_number(in_flight(actions) / chunks))
    duration = f"{format_number(end_s)} {unit}" if unit else format_seconds(end_s)
    words = f"the step takes {duration}, and {row}s are idle for {bubble(slots):.0%} of it"
    sizes = f"{format_count(len(stages), row)} and {format_count(count, 'micro-batch')}"
    usual = "Equal"
    if chunks > 1 or "backward_weight" in {slot.kind for slot in slots}:
        usual = "With GPipe or 1F1B, equal"
    kind = "Timeline"
    source = "Measured"
    if model:
        kind = "Predicted timetable"
        source = "Predicted"
    formula = f"(P - 1) / (M + P - 1) = {bubble_formula(len(stages), count):.0%}"
    return CaptionedFigure(
        figure,
        alt=f"{kind} of {sizes}. {'; '.join(orders)}. In all, {words}.",
        caption=f"{source}: {words}. {usual} stages without hops would be idle for {formula}. "
        f"Activations of at most {', '.join(held)} micro-batches are held, by {row}.",
    )


def _actions_of(rank: int, slots: Sequence[Slot]) -> list[Action]:
    """The actions of a rank in the order in which it runs them."""
    actions = []
    for slot in sorted(slots, key=lambda slot: slot.start_s):
        if slot.rank == rank:
            actions.append(Action(slot.kind, slot.micro_batch, slot.chunk))
    return actions


@drawn
def step_by_micro_batches(
    rows: Iterable[Mapping[str, Any]], *, title: str = "Step by number of micro-batches"
) -> CaptionedFigure:
    """Draw the time of a step over the number of micro-batches.

    Args:
        rows: dicts with ``schedule`` (the curve's name), ``micro_batches``, ``step_s`` (a number,
            or its repeats: the point is their median, the band spans them) and ``model_s`` (the
            predicted step).
    """
    measured: dict[str, dict[int, list[float]]] = {}
    predicted: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: row["micro_batches"]):
        name = row["schedule"]
        count = row["micro_batches"]
        measured.setdefault(name, {})[count] = as_repeats(row["step_s"])
        predicted.setdefault(name, {})[count] = row["model_s"]
    best = []
    for name, steps in measured.items():
        steps_s = {count: median(repeats) for count, repeats in steps.items()}
        fastest = min(steps_s, key=steps_s.__getitem__)
        count = format_count(fastest, "micro-batch")
        best.append(f"{name} is fastest with {count}, {format_seconds(steps_s[fastest])}.")
    return draw_curves(measured, predicted, title, "micro-batches", joined(*best), log_time=False)
