"""A pipeline's step as predicted and as it ran, and its time by the number of micro-batches.

Symbols: P stages, M micro-batches.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from labkit.costs.pipeline_timeline import Slot, bubble, bubble_formula
from labkit.schedules.pipeline import Action, in_flight
from labkit.tracing import Span, Trace
from labkit.units import (
    as_repeats,
    byte_unit,
    format_bytes,
    format_count,
    format_number,
    format_seconds,
    second_unit,
)
from workbook.plots.figure import (
    WIDTH_IN,
    WIDTH_PX,
    CaptionedFigure,
    add_legend,
    add_title,
    drawn,
    joined,
    label_lanes,
    new_axes,
    quartiles,
    repeats_words,
)
from workbook.plots.palette import SERIES
from workbook.plots.timeline import (
    draw_spans,
    lane_names,
    tag,
    trace_of,
)

Streams = Sequence[Sequence[Action]]
# {name: the rows of a curve, in ascending order of micro-batches}
Curves = dict[str, list[Mapping[str, Any]]]


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
    spans = [Span(slot.stage, slot.kind, slot.start_s, slot.end_s) for slot in slots]
    end_s = max(slot.end_s for slot in slots)
    for stage, mine in _by_stage(slots).items():
        edges = [0.0, *(time for slot in mine for time in (slot.start_s, slot.end_s)), end_s]
        gaps = zip(edges[::2], edges[1::2])
        spans += [Span(stage, "wait", low, high) for low, high in gaps if high > low]
    title = f"{title or 'Timetable of a step'} (model)"
    figure = _draw_rows(spans, slots, title, unit, model=True)
    names = [str(stage) for stage in _by_stage(slots)]
    label_lanes(figure.axes[0], names)
    alt, caption = _words(slots, names, unit, "Predicted timetable", "Model")
    return CaptionedFigure(figure, alt=alt, caption=caption)


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
    trace, stages = trace_of(result), range(len(streams))
    # A span too short to be seen should not add an entry to the legend.
    least_s = (end_s - start_s) / 5000
    spans = [
        Span(s.rank, s.kind, s.start_s - start_s, s.end_s - start_s)
        for s in trace.between(start_s, end_s).of(lane=0)
        if s.rank in stages and s.duration_s > least_s
    ]
    # A stage that is done waits for the end of the step, also where the trace ends before.
    last_s = {s.rank: s.end_s for s in sorted(spans, key=lambda s: s.end_s)}
    length_s = end_s - start_s
    spans += [Span(rank, "wait", at, length_s) for rank, at in last_s.items() if at < length_s]
    shown = [s._replace(start_s=s.start_s - start_s, end_s=s.end_s - start_s) for s in slots]
    figure = _draw_rows(spans, shown, title or "A step as it ran", None, model=False)
    label, names = lane_names(result, trace, stages, "stage")
    figure.axes[0].set_ylabel(label)
    label_lanes(figure.axes[0], names)
    alt, caption = _words(shown, names, None, "Timeline", "Measured")
    return CaptionedFigure(figure, alt=alt, caption=caption)


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


def _by_stage(slots: Sequence[Slot]) -> dict[int, list[Slot]]:
    """By stage, its slots in order."""
    found: dict[int, list[Slot]] = {stage: [] for stage in sorted({s.stage for s in slots})}
    for slot in sorted(slots, key=lambda slot: slot.start_s):
        found[slot.stage].append(slot)
    return found


def _draw_rows(
    spans: list[Span], slots: Sequence[Slot], title: str, unit: str | None, model: bool
) -> Figure:
    """One row per stage from 0 to the end of the step; ``slots`` number the boxes."""
    stages, end_s = list(_by_stage(slots)), max(span.end_s for span in spans)
    scale, unit = (1.0, unit) if unit else second_unit(end_s / 2)
    figure, axes = new_axes(1.5 + 0.45 * len(stages), title)
    axes.set_xlim(0, end_s / scale)
    entries = draw_spans(axes, spans, stages, scale, model, "idle" if model else "wait")
    for slot in slots:
        # ``F3``, or ``3``, or nothing, whichever fits the box.
        pixels = (slot.end_s - slot.start_s) / end_s * (WIDTH_PX - 60)
        name = str(Action(slot.kind, slot.micro_batch))
        if text := next((one for one in (name, name[1:]) if pixels > 8 * len(one) + 6), ""):
            middle = (slot.start_s + slot.end_s) / 2 / scale
            tag(axes, middle, stages.index(slot.stage), text, pad=0.15)
    axes.set(xlabel=f"time ({unit})", ylabel="stage")
    add_legend(figure, entries)
    return figure


def _words(
    slots: Sequence[Slot], names: Sequence[str], unit: str | None, name: str, source: str
) -> tuple[str, str]:
    """Alt text, with the order of each stage's actions, and caption, with the bubble."""
    by_stage = _by_stage(slots)
    count = len({slot.micro_batch for slot in slots})
    length = max(slot.end_s for slot in slots) - min(slot.start_s for slot in slots)
    takes = f"{format_number(length)} {unit}" if unit else format_seconds(length)
    words = f"the step takes {takes}, and stages are idle for {bubble(slots):.0%} of it"
    orders, held = [], []
    for stage, mine in zip(names, by_stage.values()):
        actions = [Action(slot.kind, slot.micro_batch) for slot in mine]
        order = " ".join(map(str, actions[:12])) + " and so on" * (len(actions) > 12)
        orders.append(f"stage {stage} {order}".replace("\n", ", "))
        held.append(str(in_flight(actions)))
    sizes = f"{format_count(len(by_stage), 'stage')} and {format_count(count, 'micro-batch')}"
    alt = f"{name} of {sizes}. {'; '.join(orders)}. In all, {words}."
    formula = f"(P - 1) / (M + P - 1) = {bubble_formula(len(by_stage), count):.0%}"
    return alt, (
        f"{source}: {words}. Equal stages without hops would be idle for {formula}. "
        f"Activations of at most {', '.join(held)} micro-batches are held, by stage."
    )


@drawn
def step_by_micro_batches(
    rows: Iterable[Mapping[str, Any]], *, title: str | None = None
) -> CaptionedFigure:
    """Draw the time and the memory of a step over the number of micro-batches.

    Args:
        rows: dicts with ``schedule`` (the curve's name), ``micro_batches`` and ``step_s`` (a
            number, or its repeats: the point is their median, the band spans the middle half),
            and optionally ``model_s`` (the predicted step) and ``memory_bytes`` (of each stage;
            the largest is drawn).
        title: above the figure.

    Raises:
        ValueError: no rows.
    """
    curves: Curves = {}
    for row in sorted(rows, key=lambda row: row["micro_batches"]):
        curves.setdefault(str(row["schedule"]), []).append(row)
    if not curves:
        raise ValueError(
            "no rows to draw: measure a split with at least one number of micro-batches"
        )
    parts, sentences = [], []
    for name, mine in curves.items():
        ends = [f"{_seconds(row)} with {row['micro_batches']}" for row in (mine[0], mine[-1])]
        parts.append(f"{name}: {', '.join(ends)}")
        best = min(mine, key=_median_s)
        text = f"{name} is fastest with {format_count(best['micro_batches'], 'micro-batch')}"
        text += f", {_seconds(best)}"
        if "memory_bytes" in best:
            text += f" and {format_bytes(_memory(best))} on its largest stage"
        sentences.append(text)
    steps = [as_repeats(row["step_s"]) for mine in curves.values() for row in mine]
    spread = repeats_words(steps, "Points", "steps", "the middle half")
    return CaptionedFigure(
        _draw_curves(curves, title or "Step and memory by number of micro-batches"),
        alt=f"Curves of a step's time over the number of micro-batches. {'; '.join(parts)}.",
        caption=joined(f"{'; '.join(sentences)}.", spread),
    )


def _draw_curves(curves: Curves, title: str) -> Figure:
    rows = [row for mine in curves.values() for row in mine]
    has_memory = any("memory_bytes" in row for row in rows)
    figure = Figure(figsize=(WIDTH_IN, 3.8))
    grid = figure.subplots(1, 1 + has_memory, squeeze=False, sharex=True)[0]
    entries = _draw_steps(grid[0], curves, *second_unit(max(map(_median_s, rows))))
    if has_memory:
        scale, unit = byte_unit(max(_memory(row) for row in rows if "memory_bytes" in row))
        for mine, (style, marker, _) in zip(curves.values(), itertools.cycle(SERIES)):
            held = {row["micro_batches"]: _memory(row) for row in mine if "memory_bytes" in row}
            sizes = [size / scale for size in held.values()]
            grid[1].plot(list(held), sizes, color=style.color, marker=marker)
        grid[1].set(title="Memory of the largest stage", ylabel=f"memory ({unit})")
    counts = sorted({row["micro_batches"] for row in rows})
    for axes in grid:
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("micro-batches")
        axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
        axes.grid()
    add_title(figure, title)
    add_legend(figure, entries)
    return figure


def _draw_steps(axes: Axes, curves: Curves, scale: float, unit: str) -> list[Any]:
    entries: list[Any] = []
    for (name, rows), (style, marker, _) in zip(curves.items(), itertools.cycle(SERIES)):
        counts = [row["micro_batches"] for row in rows]
        middle = [_median_s(row) / scale for row in rows]
        entries += axes.plot(counts, middle, color=style.color, marker=marker, label=name)
        ends = zip(*(quartiles(as_repeats(row["step_s"])) for row in rows))
        low, high = ([s / scale for s in end] for end in ends)
        axes.fill_between(counts, low, high, color=style.color, alpha=0.2, linewidth=0)
        if model := {row["micro_batches"]: row["model_s"] for row in rows if "model_s" in row}:
            look: dict[str, Any] = {"color": style.model.ink, "linestyle": (0, (5, 3))}
            ys = [s / scale for s in model.values()]
            entries += axes.plot(list(model), ys, label=f"{name} model", zorder=3, **look)
    axes.set(title="Step", ylabel=f"time of a step ({unit})")
    return entries


def _median_s(row: Mapping[str, Any]) -> float:
    return statistics.median(as_repeats(row["step_s"]))


def _seconds(row: Mapping[str, Any]) -> str:
    return format_seconds(_median_s(row))


def _memory(row: Mapping[str, Any]) -> float:
    return max(as_repeats(row["memory_bytes"]))
