"""A model cut into stages: what the split costs by the model, beside what was measured."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.ticker import MaxNLocator

from labkit.placement.planner import SplitModel
from labkit.placement.stage_costs import Profile
from labkit.plots.figure import (
    BLUE,
    DARK,
    GREY,
    STYLES,
    VERMILLION,
    WIDTH_IN,
    CaptionedFigure,
    Style,
    drawn,
    tint,
)
from labkit.plots.sheet import Box, Panel, Sheet
from labkit.plots.stacks import Bar, Columns, draw_bars
from labkit.schedules.stages import stage_bounds
from labkit.units import byte_unit, format_bytes, format_count, format_seconds, second_unit

if TYPE_CHECKING:
    from labkit.training.split_run import MeasuredSplit

_HEIGHT_IN = 5.4
_LOOKS = {kind: STYLES[kind] for kind in ("forward", "backward", "activation", "gradient")}
_LOOKS |= {"step": Style(DARK), "memory": Style(BLUE)}
_CUT, _NO_CUT = Style(VERMILLION), Style(tint(VERMILLION, 0.3))


class Reach(NamedTuple):
    """How far the axes go at least: under a slider, bars should move, and axes stay."""

    step_s: float = 0.0
    hop_s: float = 0.0
    memory_bytes: float = 0.0


class SplitBars(NamedTuple):
    """A split as bars, predicted or measured: seconds, and bytes of memory."""

    stages: list[Bar]
    hops: list[Bar]
    step: Bar
    memory: list[Bar]

    @classmethod
    def of(cls, split: "SplitModel | MeasuredSplit") -> "SplitBars":
        if isinstance(split, SplitModel):
            hops = [([there], [back]) for there, back in zip(split.hop_s, split.backward_hop_s)]
            steps = [split.step_s]
        else:
            hops = list(zip(split.forward_hop_s, split.backward_hop_s))
            steps = list(split.step_s)
        return cls(
            [
                Bar({"forward": f, "backward": b})
                for f, b in zip(split.forward_s, split.backward_s)
            ],
            [_hop_bar(there, back) for there, back in hops],
            Bar({"step": statistics.median(steps)}, steps),
            [Bar({"memory": size}) for size in split.memory_bytes],
        )


def _hop_bar(there: Sequence[float], back: Sequence[float]) -> Bar:
    """Seconds by step, activations and gradients; these are none where nothing is trained."""
    medians = {
        "activation": statistics.median(there),
        "gradient": statistics.median(back or [0.0]),
    }
    return Bar(medians, [sum(pair) for pair in zip(there, back or [0.0] * len(there))])


@drawn
def split_costs(
    profile: Profile,
    predicted: SplitModel,
    measured: "MeasuredSplit | None" = None,
    *,
    title: str | None = None,
    reach: Reach | None = None,
) -> CaptionedFigure:
    """Draw what a split costs: bytes over each cut, memory, and the time of stages and hops.

    Args:
        profile: the model's layers, of the same batch size as the split.
        predicted: ``labkit.placement.planner.predict_split`` of this profile.
        measured: ``labkit.training.split_run.measure_split`` of the same split; its bars stand
            beside those of the model, which are hatched. None leaves them out.
        title: above the figure.
        reach: how far the axes go at least; None leaves that to the bars.

    Raises:
        ValueError: the measured split has other split points, micro-batches or batch size.
    """
    if measured is not None:
        _check_same(profile, predicted, measured)
    title = title or f"{profile.model} in {_stages(predicted)}, {_batch(profile, predicted)}"
    return CaptionedFigure(
        _draw(profile, predicted, measured, title, reach or Reach()),
        alt=_alt(profile, predicted, measured),
        caption=split_words(predicted, measured),
    )


def split_words(predicted: SplitModel, measured: "MeasuredSplit | None" = None) -> str:
    """The split in two or three sentences: its step, what is idle, what was measured."""
    model = SplitBars.of(predicted)
    text = f"Model: the step takes {format_seconds(predicted.step_s)}"
    if model.hops:
        stages_s = [bar.total for bar in model.stages]
        largest = stages_s.index(max(stages_s))
        text += (
            f", with {format_seconds(sum(bar.total for bar in model.hops))} of hops. The largest "
            f"stage is stage {largest} with {format_seconds(stages_s[largest])}; stages are "
            f"idle for {predicted.bubble:.0%} of the step"
        )
    if measured is None:
        return f"{text}."
    step = SplitBars.of(measured).step
    return (
        f"{text}. Measured: {format_seconds(step.total)}, {step.total / predicted.step_s:.2f} "
        f"times the model (median of {len(step.repeats)} steps; whiskers span the middle half)."
    )


def _check_same(profile: Profile, predicted: SplitModel, measured: "MeasuredSplit") -> None:
    ours = predicted.split_points, predicted.micro_batches, profile.batch_size
    theirs = tuple(measured.split_points), measured.micro_batches, measured.batch_size
    if ours != theirs:
        names = "split points {}, micro_batches {}, batch size {}"
        raise ValueError(
            f"the model is for {names.format(*ours)}, the measurement for "
            f"{names.format(*theirs)}: compare the same split"
        )


def _stages(predicted: SplitModel) -> str:
    return format_count(len(predicted.forward_s), "stage")


def _batch(profile: Profile, predicted: SplitModel) -> str:
    text = f"batch of {profile.batch_size}"
    if predicted.micro_batches == 1:
        return text
    return f"{text} in {predicted.micro_batches} micro-batches ({predicted.schedule})"


def _alt(profile: Profile, predicted: SplitModel, measured: "MeasuredSplit | None") -> str:
    head = f"{profile.model} in {_stages(predicted)}"
    if predicted.split_points:
        before = ", ".join(map(str, predicted.split_points))
        head += f", cut before layer{'s' * (len(predicted.split_points) > 1)} {before}"
    text = f"{head}, {_batch(profile, predicted)}. Predicted {_in_words(predicted)}."
    return text if measured is None else f"{text} Measured {_in_words(measured)}."


def _in_words(split: "SplitModel | MeasuredSplit") -> str:
    bars = SplitBars.of(split)
    parts = [f"step {format_seconds(bars.step.total)}"]
    for stage, (bar, memory) in enumerate(zip(bars.stages, bars.memory)):
        size = format_bytes(memory.total)
        parts.append(f"stage {stage} {format_seconds(bar.total)} and {size} of memory")
    for point, size, bar in zip(split.split_points, split.hop_bytes, bars.hops):
        parts.append(f"cut {point} {format_seconds(bar.total)} for {format_bytes(size)} a way")
    return "; ".join(parts)


def _draw(
    profile: Profile,
    predicted: SplitModel,
    measured: "MeasuredSplit | None",
    title: str,
    reach: Reach,
) -> Sheet:
    sheet = Sheet(WIDTH_IN, _HEIGHT_IN)
    sheet.write(title, 6, sheet.height - 16, align="left", size=12, bold=True)
    bars = [SplitBars.of(split) for split in (predicted, measured) if split]
    _draw_cuts(sheet, Box(48, 256, 350, 340), profile, predicted)
    memory = [split.memory for split in bars]
    _draw_memory(sheet, Box(412, 256, 608, 340), memory, reach.memory_bytes)
    right, kinds = (376, 4) if predicted.hop_s else (608, 2)
    stages = [[*split.stages, split.step] for split in bars]
    names = _stage_names(profile, predicted)
    frame = Box(48, 62, right, 190)
    _draw_times(sheet, frame, "Stages, and the whole step", names, stages, reach.step_s)
    if predicted.hop_s:
        sizes = map(format_bytes, predicted.hop_bytes)
        names = [(f"cut {point}", size) for point, size in zip(predicted.split_points, sizes)]
        frame = Box(right + 56, 62, 608, 190)
        hops = [split.hops for split in bars]
        _draw_times(sheet, frame, "Hops, there and back", names, hops, reach.hop_s)
    looks = [(kind, look if measured else look.model) for kind, look in _LOOKS.items()]
    sheet.legend([*looks[:kinds], ("hatched: model", Style(GREY).model)], 8)
    sheet.finish()
    return sheet


def _draw_cuts(sheet: Sheet, frame: Box, profile: Profile, predicted: SplitModel) -> None:
    """What would cross, wherever the model were cut; the cuts that are made stand out."""
    sizes = [layer.output_bytes for layer in profile.layers[:-1]]
    scale, unit = byte_unit(max(sizes, default=0))
    name = f"activation ({unit})"
    panel = Panel(sheet, frame, "Bytes over a cut", name, max(sizes, default=0) / scale)
    pitch = (frame.right - frame.left) / len(profile.layers)
    ticks = MaxNLocator(8, integer=True).tick_values(0, len(sizes))
    for point, size in enumerate(sizes, start=1):
        x, top = frame.left + pitch * point, panel.y(size / scale)
        box = Box(x - 0.4 * pitch, frame.bottom, x + 0.4 * pitch, top)
        if point in predicted.split_points:
            sheet.box("cut", _CUT, box)
            sheet.line((x, top), (x, frame.top + 4))
        else:
            sheet.box("no cut", _NO_CUT, box)
        if point in ticks:
            sheet.write(str(point), x, frame.bottom - 13)
    for stage, (start, end) in enumerate(stage_bounds(predicted.split_points, len(sizes) + 1)):
        width = pitch * (end - start)
        if width > 12:
            name = f"stage {stage}" if width > 48 else str(stage)
            sheet.write(name, frame.left + pitch * (start + end) / 2, frame.top - 6)
    middle = (frame.left + frame.right) / 2
    sheet.write("split point (layer behind the cut)", middle, frame.bottom - 29, size=11)


def _draw_memory(sheet: Sheet, frame: Box, columns: Columns, least: float) -> None:
    highest = _highest(columns, least)
    scale, unit = byte_unit(highest)
    panel = Panel(sheet, frame, "Memory", f"held ({unit})", highest / scale)
    for stage, x in enumerate(draw_bars(panel, columns, _LOOKS, scale, digits=2)):
        sheet.write(str(stage), x, frame.bottom - 13)
    sheet.write("stage", (frame.left + frame.right) / 2, frame.bottom - 29, size=11)


def _draw_times(
    sheet: Sheet,
    frame: Box,
    title: str,
    names: list[tuple[str, str]],
    columns: Columns,
    least: float,
) -> None:
    """``names``: under each group, in two lines."""
    highest = _highest(columns, least)
    scale, unit = second_unit(highest)
    panel = Panel(sheet, frame, title, f"time ({unit})", highest / scale)
    for (above, below), x in zip(names, draw_bars(panel, columns, _LOOKS, scale, digits=3)):
        sheet.write(above, x, frame.bottom - 14)
        sheet.write(below, x, frame.bottom - 28)


def _highest(columns: Columns, least: float) -> float:
    return max(least, *(bar.top for column in columns for bar in column))


def _stage_names(profile: Profile, predicted: SplitModel) -> list[tuple[str, str]]:
    names: list[tuple[str, str]] = []
    bounds = stage_bounds(predicted.split_points, len(profile.layers))
    for stage, (start, end) in enumerate(bounds):
        layers = str(start) if end == start + 1 else f"{start}-{end - 1}"
        # Four stages stand too close for the word under each.
        if stage == 0 or len(bounds) < 4:
            layers = f"layer{'s' * (end > start + 1)} {layers}"
        names.append((f"stage {stage}", layers))
    return [*names, ("step", f"idle {predicted.bubble:.0%}")]
