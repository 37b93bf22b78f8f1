"""What it costs to cut a network into stages: predicted costs beside measured ones."""

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from labkit import units
from labkit.placement.planner import SplitModel
from labkit.placement.stage_costs import Profile
from labkit.schedules.split_points import stage_bounds
from workbook.plots.figure import (
    WIDTH_IN,
    CaptionedFigure,
    add_legend,
    add_title,
    drawn,
    fixed_axes,
)
from workbook.plots.lane_names import memory_words, peaks_of
from workbook.plots.palette import BLUE, DARK, GREY, STYLES, VERMILION, Style, swatch, tint
from workbook.plots.repeats import quartiles

if TYPE_CHECKING:
    from labkit.training.split_run import MeasuredSplit

_HEIGHT_IN = 5.4
_LOOKS = {kind: STYLES[kind] for kind in ("forward", "backward", "activation", "gradient")}
_LOOKS |= {"step": Style(DARK), "memory": Style(BLUE)}


class AxisRange(NamedTuple):
    """The least upper ends of the axes: with a slider, bars should change and axes stay."""

    step_s: float = 0.0
    hop_s: float = 0.0
    memory_bytes: float = 0.0


class _Bar(NamedTuple):
    """A stacked bar: its parts by kind, and the repeats of their sum if there are any."""

    parts: dict[str, float]
    repeats: Sequence[float] = ()

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def quartiles(self) -> tuple[float, float]:
        return quartiles(self.repeats or [self.total])

    @property
    def top(self) -> float:
        return max(self.total, self.quartiles[1])


# The predicted bars, then the measured ones if there are any; each list has one bar per group.
_Columns = list[list[_Bar]]


class _SplitBars(NamedTuple):
    """A split as bars, predicted or measured: seconds, and bytes of memory."""

    stages: list[_Bar]
    hops: list[_Bar]
    step: _Bar
    memory: list[_Bar]
    hop_bytes: Sequence[int]

    @classmethod
    def of(cls, split: "SplitModel | MeasuredSplit") -> "_SplitBars":
        if isinstance(split, SplitModel):
            hops = [([there], [back]) for there, back in zip(split.hop_s, split.backward_hop_s)]
            steps = [split.step_s]
        else:
            hops = list(zip(split.forward_hop_s, split.backward_hop_s))
            steps = split.step_s
        return cls(
            [
                _Bar({"forward": f, "backward": b})
                for f, b in zip(split.forward_s, split.backward_s)
            ],
            [_hop_bar(there, back) for there, back in hops],
            _Bar({"step": statistics.median(steps)}, steps),
            [_Bar({"memory": size}) for size in split.memory_bytes],
            split.hop_bytes,
        )


def _hop_bar(there: Sequence[float], back: Sequence[float]) -> _Bar:
    """The bar of one hop from its seconds per step; ``back`` is empty if no gradient crosses."""
    back = back or [0.0] * len(there)
    medians = {"activation": statistics.median(there), "gradient": statistics.median(back)}
    return _Bar(medians, [sum(pair) for pair in zip(there, back)])


@drawn
def split_costs(
    profile: Profile,
    predicted: SplitModel,
    measured: "MeasuredSplit | None" = None,
    *,
    title: str | None = None,
    axis_range: AxisRange | None = None,
) -> CaptionedFigure:
    """Draw what a split costs: bytes over each cut, memory, and the time of stages and hops.

    Args:
        profile: the model's layers, for the same batch size as the split.
        predicted: from ``labkit.placement.planner.predict_split``, of this profile.
        measured: from ``labkit.training.split_run.measure_split``, of the same split; its bars
            are beside the predicted ones, which are hatched. None leaves them out.
        title: above the figure.
        axis_range: how far the axes reach at least; by default they end with the bars.

    Raises:
        ValueError: the measured split has other split points, micro-batches or batch size.
    """
    if measured is not None:
        _check_same(profile, predicted, measured)
    title = title or f"{profile.model} in {_stages(predicted)}, {_batch(profile, predicted)}"
    bars = [_SplitBars.of(split) for split in (predicted, measured) if split]
    return CaptionedFigure(
        _draw(profile, predicted, bars, title, axis_range or AxisRange()),
        alt=_alt(profile, predicted, bars),
        caption=split_caption(predicted, measured),
    )


def split_caption(predicted: SplitModel, measured: "MeasuredSplit | None" = None) -> str:
    """The caption of ``split_costs`` alone: the predicted step, and the measured one.

    The bars of measured memory are counted from the stages' tensors; the caption also has the
    peak of their processes or GPUs.
    """
    bars = [_SplitBars.of(split) for split in (predicted, measured) if split]
    peaks = memory_words(peaks_of(measured), "stage")
    return " ".join(filter(None, (_caption(predicted, bars), peaks)))


def _check_same(profile: Profile, predicted: SplitModel, measured: "MeasuredSplit") -> None:
    ours = predicted.split_points, predicted.micro_batches, profile.batch_size
    theirs = tuple(measured.split_points), measured.micro_batches, measured.batch_size
    if ours != theirs:
        names = "split points {}, micro_batches {}, batch size {}"
        raise ValueError(
            f"the prediction is for {names.format(*ours)}, the measurement for "
            f"{names.format(*theirs)}: compare the same split"
        )


def _stages(predicted: SplitModel) -> str:
    return units.format_count(len(predicted.forward_s), "stage")


def _batch(profile: Profile, predicted: SplitModel) -> str:
    text = f"batch of {profile.batch_size}"
    if predicted.micro_batches == 1:
        return text
    return f"{text} in {predicted.micro_batches} micro-batches ({predicted.schedule})"


def cuts_words(split_points: Sequence[int]) -> str:
    """``cut before layers 10, 17``."""
    return f"cut before layer{'s' * (len(split_points) > 1)} {', '.join(map(str, split_points))}"


def _alt(profile: Profile, predicted: SplitModel, bars: list[_SplitBars]) -> str:
    head = f"{profile.model} in {_stages(predicted)}"
    if predicted.split_points:
        head += f", {cuts_words(predicted.split_points)}"
    splits = zip(("Predicted", "Measured"), bars)
    words = (f"{name} {_in_words(predicted, split)}." for name, split in splits)
    return f"{head}, {_batch(profile, predicted)}. {' '.join(words)}"


def _in_words(predicted: SplitModel, bars: _SplitBars) -> str:
    parts = [f"step {units.format_seconds(bars.step.total)}"]
    for stage, (bar, memory) in enumerate(zip(bars.stages, bars.memory)):
        size = units.format_bytes(memory.total)
        parts.append(f"stage {stage} {units.format_seconds(bar.total)} and {size} of memory")
    sizes = map(units.format_bytes, bars.hop_bytes)
    for point, size, bar in zip(predicted.split_points, sizes, bars.hops):
        parts.append(f"cut {point} {units.format_seconds(bar.total)} for {size} a way")
    return "; ".join(parts)


def _caption(predicted: SplitModel, bars: list[_SplitBars]) -> str:
    """The predicted step and its idle share, and the measured step."""
    model, *measured = bars
    text = f"Model: the step takes {units.format_seconds(predicted.step_s)}"
    if model.hops:
        hops_s = sum(bar.total for bar in model.hops)
        stages_s = [bar.total for bar in model.stages]
        largest_s = max(stages_s)
        text += (
            f", with {units.format_seconds(hops_s)} of hops. The largest stage is stage "
            f"{stages_s.index(largest_s)} with {units.format_seconds(largest_s)}; stages are idle "
            f"for {predicted.bubble:.0%} of the step"
        )
    if not measured:
        return f"{text}."
    step = measured[0].step
    ratio = step.total / predicted.step_s
    return (
        f"{text}. Measured: {units.format_seconds(step.total)}, {ratio:.2f} times the model "
        f"(median of {len(step.repeats)} steps; whiskers span the middle half)."
    )


def _draw(
    profile: Profile, predicted: SplitModel, bars: list[_SplitBars], title: str, least: AxisRange
) -> Figure:
    figure = Figure(figsize=(WIDTH_IN, _HEIGHT_IN))
    add_title(figure, title)
    _draw_bytes(_panel(figure, 48, 350, 256, "Bytes over a cut"), profile, predicted)
    memory = [split.memory for split in bars]
    _draw_memory(_panel(figure, 412, 604, 256, "Memory"), memory, least.memory_bytes)
    right = 376 if predicted.hop_s else 604
    axes = _panel(figure, 48, right, 66, "Stages, and the whole step")
    stages = [[*split.stages, split.step] for split in bars]
    _draw_times(axes, _stage_names(profile, predicted), stages, least.step_s)
    if predicted.hop_s:
        axes = _panel(figure, 432, 604, 66, "Hops, there and back")
        sizes = map(units.format_bytes, predicted.hop_bytes)
        names = [f"cut {point}\n{size}" for point, size in zip(predicted.split_points, sizes)]
        _draw_times(axes, names, [split.hops for split in bars], least.hop_s)
    looks = list(_LOOKS.items())[: 4 if predicted.hop_s else 2]
    entries = [swatch(kind, look.model if len(bars) == 1 else look) for kind, look in looks]
    add_legend(figure, [*entries, swatch("hatched: model", Style(GREY).model)])
    return figure


def _panel(figure: Figure, left: float, right: float, bottom: float, title: str) -> Axes:
    """Axes at a fixed place, given in points: 72 to the inch, from the lower left corner."""
    top = bottom + (84 if bottom > 36 * _HEIGHT_IN else 124)
    axes = fixed_axes(figure, left, right, bottom, top)
    # Without y, matplotlib searches for a place for the title, for as long as the axes take.
    axes.set_title(title, y=1.0)
    axes.yaxis.set_label_coords(-30 / (right - left), 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.format_number(value)))
    axes.tick_params(axis="x", length=0)
    return axes


def _draw_bytes(axes: Axes, profile: Profile, predicted: SplitModel) -> None:
    """Draw the bytes that each possible cut would send; the cuts of this split stand out."""
    num_layers, points = len(profile.layers), predicted.split_points
    sizes = [layer.output_bytes for layer in profile.layers[:-1]]
    scale, unit = units.byte_unit(max(sizes, default=0))
    highest = max(sizes, default=0) / scale or 1.0
    places = range(1, num_layers)
    colors = [VERMILION if place in points else tint(VERMILION, 0.3) for place in places]
    tops = [size / scale for size in sizes]
    # Bars as lines of a single artist, which is drawn many times as fast as an artist per bar.
    bar_points = 0.8 * 72 * WIDTH_IN * axes.get_position().width / num_layers
    axes.vlines(places, 0, tops, colors, linewidth=bar_points)
    # Leave room above the highest bar for the names of the stages.
    axes.set(xlim=(0, num_layers), ylim=(0, 1.2 * highest))
    axes.vlines(points, [tops[point - 1] for point in points], 1.25 * highest, DARK, lw=0.8)
    for stage, (start, end) in enumerate(stage_bounds(points, num_layers)):
        if (share := (end - start) / num_layers) > 0.04:
            name = f"stage {stage}" if share > 0.16 else str(stage)
            axes.text((start + end) / 2, 1.19 * highest, name, ha="center", va="top")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.set(xlabel="split point (layer behind the cut)", ylabel=f"activation ({unit})")


def _draw_memory(axes: Axes, columns: _Columns, least_bytes: float) -> None:
    unit = _draw_bars(axes, columns, least_bytes, units.byte_unit, digits=2)
    axes.set(xlabel="stage", ylabel=f"held ({unit})", xticks=range(len(columns[0])))


def _draw_times(axes: Axes, names: list[str], columns: _Columns, least_s: float) -> None:
    """Draw the groups of bars with ``names``, of two lines each, below them."""
    unit = _draw_bars(axes, columns, least_s, units.second_unit, digits=3)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel(f"time ({unit})")


def _draw_bars(axes: Axes, columns: _Columns, least: float, unit_of: Callable, digits: int) -> str:
    """Draw one group of bars per place, measured right of predicted, and return the unit."""
    highest = max(least, *(bar.top for column in columns for bar in column)) or 1.0
    scale, unit = unit_of(highest)
    shifts, width = ((-0.22, 0.22), 0.42) if len(columns) == 2 else ((0.0,), 0.5)
    for bars, is_model, shift in zip(columns, (True, False), shifts):
        xs = np.arange(len(bars)) + shift
        _draw_stacks(axes, xs, bars, width, scale, is_model)
        for x, bar in zip(xs, bars):
            low, high = (end / scale for end in bar.quartiles)
            if high > low:
                axes.plot([x, x], [low, high], color=DARK, linewidth=0.8, marker="_")
            top = (bar.top + 0.03 * highest) / scale
            axes.text(x, top, _number(bar.total / scale, digits), ha="center")
    axes.set_xlim(-0.5, len(columns[0]) - 0.5)
    # Leave room for a number above the highest bar.
    axes.set_ylim(0, 1.2 * highest / scale)
    return unit


def _draw_stacks(
    axes: Axes, xs: np.ndarray, bars: list[_Bar], width: float, scale: float, is_model: bool
) -> None:
    bottoms = np.zeros(len(bars))
    for kind, look in _LOOKS.items():
        heights = np.array([bar.parts.get(kind, 0.0) for bar in bars]) / scale
        if (seen := heights > 0).any():
            style = (look.model if is_model else look).fill
            axes.bar(xs[seen], heights[seen], width, bottoms[seen], label=kind, **style)
        bottoms += heights


def _number(value: float, digits: int) -> str:
    """Short text for a narrow bar: with 3 digits 123, 12.3, 1.23, 0.12, and <.01 for less."""
    places = max(0, digits - len(f"{value:.0f}"))
    if 0 < value < 0.5 * 10**-places:
        return f"<{10**-places:.{places}f}".replace("0.", ".")
    return "0" if value == 0 else f"{value:.{places}f}"


def _stage_names(profile: Profile, predicted: SplitModel) -> list[str]:
    names = []
    bounds = stage_bounds(predicted.split_points, len(profile.layers))
    for stage, (start, end) in enumerate(bounds):
        layers = str(start) if end == start + 1 else f"{start}-{end - 1}"
        # With four stages, there is no room for the word under each of them.
        if stage == 0 or len(bounds) < 4:
            layers = f"layer{'s' * (end > start + 1)} {layers}"
        names.append(f"stage {stage}\n{layers}")
    return [*names, f"step\nidle {predicted.bubble:.0%}"]
