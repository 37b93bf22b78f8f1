"""What it costs to cut a network into stages: predicted costs beside measured ones."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.placement.planner import Profile, SplitModel
from labkit.schedules.split_points import stage_bounds
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
    CaptionedFigure,
    add_legend,
    add_title,
    drawn,
    joined,
    new_axes,
    number_axis,
    quartiles,
    range_words,
)
from workbook.plots.palette import BLUE, DARK, GREY, STYLES, VERMILION, Style, swatch, tint
from workbook.plots.timeline import peak_sizes

if TYPE_CHECKING:
    from labkit.training.measured import MeasuredSplit

_LOOKS = {kind: STYLES[kind] for kind in ("forward", "backward", "activation", "gradient")}
_LOOKS |= {"step": Style(DARK), "memory": Style(BLUE)}


# A stacked bar: its parts by kind, and the repeats of their sum if there are any.
Bar = tuple[dict[str, float], Sequence[float]]


def _bars(split: "SplitModel | MeasuredSplit") -> dict[str, list[Bar]]:
    """A split as bars: seconds of stages and step, seconds of hops, and bytes of memory."""
    if isinstance(split, SplitModel):
        steps: Sequence[float] = [split.step_s]
        hops = [([there], [back]) for there, back in zip(split.hop_s, split.backward_hop_s)]
    else:
        steps, hops = split.step_s, list(zip(split.forward_hop_s, split.backward_hop_s))
    found: dict[str, list[Bar]] = {"stages": [], "hops": []}
    for forward_s, backward_s in zip(split.forward_s, split.backward_s):
        found["stages"].append(({"forward": forward_s, "backward": backward_s}, ()))
    found["stages"].append(({"step": statistics.median(steps)}, steps))
    for there, back in hops:
        # There are no times where no gradient crosses.
        back = back or [0.0] * len(there)
        parts = {"activation": statistics.median(there), "gradient": statistics.median(back)}
        found["hops"].append((parts, [sum(pair) for pair in zip(there, back)]))
    found["memory"] = [({"memory": size}, ()) for size in split.memory_bytes]
    return found


@drawn
def split_costs(
    profile: Profile,
    predicted: SplitModel,
    measured: "MeasuredSplit | None" = None,
    *,
    title: str | None = None,
) -> CaptionedFigure:
    """Draw what a split costs: bytes over each cut, memory, and the time of stages and hops.

    Args:
        profile: the model's layers, for the same batch size as the split.
        predicted: from ``labkit.placement.planner.predict_split``, of this profile.
        measured: from ``labkit.training.measured.measure_split``, of the same split; its bars
            are beside the predicted ones, which are hatched. None leaves them out.
        title: above the figure.

    Raises:
        ValueError: the measured split has other split points, micro-batches or batch size.
    """
    if measured is not None:
        ours = predicted.split_points, predicted.micro_batches, profile.batch_size
        theirs = tuple(measured.split_points), measured.micro_batches, measured.batch_size
        if ours != theirs:
            names = "split points {}, micro_batches {}, batch size {}"
            raise ValueError(
                f"the prediction is for {names.format(*ours)}, the measurement for "
                f"{names.format(*theirs)}: compare the same split"
            )
    batch = f"batch of {profile.batch_size}"
    if predicted.micro_batches > 1:
        batch += f" in {predicted.micro_batches} micro-batches ({predicted.schedule})"
    name = f"{profile.model} in {format_count(len(predicted.forward_s), 'stage')}"
    bars = [_bars(split) for split in (predicted, measured) if split]
    cuts = f", {cuts_words(predicted.split_points)}" if predicted.split_points else ""
    splits = zip(("Predicted", "Measured"), bars)
    words = (f"{source} {_in_words(predicted, split)}." for source, split in splits)
    return CaptionedFigure(
        _draw(profile, predicted, bars, title or f"{name}, {batch}"),
        alt=f"{name}{cuts}, {batch}. {' '.join(words)}",
        caption=split_caption(predicted, measured),
    )


def cuts_words(split_points: Sequence[int]) -> str:
    """``cut before layers 10, 17``."""
    return f"cut before layer{'s' * (len(split_points) > 1)} {', '.join(map(str, split_points))}"


def _in_words(predicted: SplitModel, bars: dict[str, list[Bar]]) -> str:
    *stages_s, step_s = (sum(parts.values()) for parts, _ in bars["stages"])
    parts = [f"step {format_seconds(step_s)}"]
    for stage, (seconds, (memory, _)) in enumerate(zip(stages_s, bars["memory"])):
        size = format_bytes(memory["memory"])
        parts.append(f"stage {stage} {format_seconds(seconds)} and {size} of memory")
    hops_s = [sum(hop.values()) for hop, _ in bars["hops"]]
    for point, size, seconds in zip(predicted.split_points, predicted.hop_bytes, hops_s):
        parts.append(f"cut {point} {format_seconds(seconds)} for {format_bytes(size)} a way")
    return "; ".join(parts)


def split_caption(predicted: SplitModel, measured: "MeasuredSplit | None" = None) -> str:
    """The caption of ``split_costs`` alone: the predicted step, and the measured one.

    The bars of measured memory are counted from the stages' tensors; the caption also has the
    peak of their processes or GPUs.
    """
    text = f"Model: the step takes {format_seconds(predicted.step_s)}"
    if predicted.hop_s:
        hops_s = sum(predicted.hop_s) + sum(predicted.backward_hop_s)
        stages_s = [f + b for f, b in zip(predicted.forward_s, predicted.backward_s)]
        largest_s = max(stages_s)
        text += (
            f", with {format_seconds(hops_s)} of hops. The largest stage is stage "
            f"{stages_s.index(largest_s)} with {format_seconds(largest_s)}; stages are idle "
            f"for {predicted.bubble:.0%} of the step"
        )
    if measured is None:
        return f"{text}."
    step_s = statistics.median(measured.step_s)
    said = (
        f"{text}. Measured: {format_seconds(step_s)}, {step_s / predicted.step_s:.2f} times the "
        f"model (median of {len(measured.step_s)} steps; whiskers span the middle half)."
    )
    peaks = ", ".join(f"stage {stage} {size}" for stage, size in peak_sizes(measured).items())
    return joined(said, f"Peak memory: {peaks}." if peaks else "")


def _draw(
    profile: Profile, predicted: SplitModel, bars: list[dict[str, list[Bar]]], title: str
) -> Figure:
    figure = Figure(figsize=(WIDTH_IN, 5.8))
    add_title(figure, title)
    has_hops = bool(predicted.hop_s)
    panels: dict[Any, Axes] = figure.subplot_mosaic(
        [["bytes", "memory"], ["stages", "hops" if has_hops else "stages"]],
        width_ratios=[5, 3],
        height_ratios=[2, 3],
    )
    sizes = zip(predicted.split_points, predicted.hop_bytes)
    names = {
        "memory": list(map(str, range(len(predicted.memory_bytes)))),
        "stages": _stage_names(profile, predicted),
        "hops": [f"cut {point}\n{format_bytes(size)}" for point, size in sizes],
    }
    titles = {"bytes": "Bytes over a cut", "memory": "Memory", "hops": "Hops, there and back"}
    for name, axes in panels.items():
        axes.set_title(titles.get(name, "Stages, and the whole step"))
        axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
        number_axis(axes.yaxis)
        axes.tick_params(axis="x", length=0)
        if name != "bytes":
            unit_of = byte_unit if name == "memory" else second_unit
            unit = _draw_bars(axes, [split[name] for split in bars], unit_of)
            axes.set_xticks(range(len(names[name])), names[name])
            axes.set_ylabel(f"{'held' if name == 'memory' else 'time'} ({unit})")
    panels["memory"].set_xlabel("stage")
    _draw_bytes(panels["bytes"], profile, predicted)
    looks = list(_LOOKS.items())[: 4 if has_hops else 2]
    entries = [swatch(kind, look.model if len(bars) == 1 else look) for kind, look in looks]
    add_legend(figure, [*entries, swatch("hatched: model", Style(GREY).model)])
    return figure


def _draw_bytes(axes: Axes, profile: Profile, predicted: SplitModel) -> None:
    """Draw the bytes that each possible cut would send; the cuts of this split stand out."""
    num_layers, points = len(profile.layers), predicted.split_points
    sizes = [layer.output_bytes for layer in profile.layers[:-1]]
    scale, unit = byte_unit(max(sizes, default=0))
    tops = [size / scale for size in sizes]
    highest = max(tops, default=0) or 1.0
    colors = [VERMILION if i in points else tint(VERMILION, 0.3) for i in range(1, num_layers)]
    axes.bar(range(1, num_layers), tops, 0.8, color=colors)
    # Leave room above the highest bar for the names of the stages.
    axes.set(xlim=(0, num_layers), ylim=(0, 1.25 * highest))
    axes.vlines(points, [tops[point - 1] for point in points], 1.25 * highest, DARK, lw=0.8)
    for stage, (start, end) in enumerate(stage_bounds(points, num_layers)):
        if (share := (end - start) / num_layers) > 0.04:
            name = f"stage {stage}" if share > 0.16 else str(stage)
            axes.text((start + end) / 2, 1.24 * highest, name, ha="center", va="top")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.set(xlabel="split point (layer behind the cut)", ylabel=f"activation ({unit})")


def _draw_bars(
    axes: Axes, columns: list[list[Bar]], unit_of: Callable[[float], tuple[float, str]]
) -> str:
    """Draw one group of bars per place, measured right of predicted, and return the unit."""
    tops = [max(sum(p.values()), quartiles(r or [0.0])[1]) for bars in columns for p, r in bars]
    highest = max(tops) or 1.0
    scale, unit = unit_of(highest)
    shifts, width = ((-0.22, 0.22), 0.42) if len(columns) == 2 else ((0.0,), 0.5)
    for bars, is_model, shift in zip(columns, (True, False), shifts):
        for place, (parts, repeats) in enumerate(bars):
            x, top = place + shift, 0.0
            for kind, size in parts.items():
                style = _LOOKS[kind].model if is_model else _LOOKS[kind]
                if size:
                    axes.bar(x, size / scale, width, top, label=kind, **style.fill)
                top += size / scale
            # Short, as bars are narrow.
            words = format_number(top) if top >= 1 else f"{top:.2f}"
            if len(repeats) > 1:
                low, high = (end / scale for end in quartiles(repeats))
                axes.plot([x, x], [low, high], color=DARK, linewidth=0.8, marker="_")
                top = max(top, high)
            axes.text(x, top + 0.03 * highest / scale, words, ha="center")
    axes.set_xlim(-0.5, len(columns[0]) - 0.5)
    # Leave room for a number above the highest bar.
    axes.set_ylim(0, 1.25 * highest / scale)
    return unit


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


class _Point(NamedTuple):
    """A split with its step, predicted and measured."""

    name: str
    predicted_s: float
    measured_s: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.measured_s)


@drawn
def split_scatter(
    points: Iterable[Mapping[str, Any]], *, title: str | None = None
) -> CaptionedFigure:
    """Draw predicted against measured step times of many splits, to see if the planner is right.

    Args:
        points: dicts with ``split_points``, ``predicted_s`` and ``measured_s`` of each split:
            seconds per step, measured as a number or as its repeats (the point is their median,
            the whisker spans the middle half).
        title: above the figure.

    Raises:
        ValueError: fewer than two splits.
    """
    found = [
        _Point(
            f"cut {', '.join(map(str, p['split_points']))}" if p["split_points"] else "no cut",
            p["predicted_s"],
            as_repeats(p["measured_s"]),
        )
        for p in points
    ]
    if len(found) < 2:
        splits = format_count(len(found), "split")
        raise ValueError(f"nothing to compare with {splits}: give two or more")
    chosen = min(found, key=lambda point: point.predicted_s)
    best = min(found, key=lambda point: point.median_s)
    words = [
        f"{name} is {point.name}, predicted {format_seconds(point.predicted_s)}, measured "
        f"{format_seconds(point.median_s)}."
        for name, point in (("The planner's choice", chosen), ("The fastest measured", best))
    ]
    text = f"The planner's choice, {chosen.name}, is the fastest that was measured."
    if chosen is not best:
        text = (
            f"The planner chooses {chosen.name}. Its measured step takes "
            f"{chosen.median_s / best.median_s:.2f} times the fastest one, of {best.name}."
        )
    ratios = range_words(point.median_s / point.predicted_s for point in found)
    return CaptionedFigure(
        _draw_scatter(found, chosen, best, title or "Splits, predicted and measured"),
        alt=f"Predicted against measured steps of {len(found)} splits. {' '.join(words)}",
        caption=f"{text} Measured steps are {ratios} times the model's.",
    )


def _draw_scatter(found: list[_Point], chosen: _Point, best: _Point, title: str) -> Figure:
    scale, unit = second_unit(max(point.median_s for point in found))
    figure, axes = new_axes(4.8, title)
    predicted = np.array([point.predicted_s for point in found]) / scale
    measured = np.array([point.median_s for point in found]) / scale
    low, high = np.transpose([quartiles(point.measured_s) for point in found]) / scale
    axes.vlines(predicted, low, high, tint(BLUE, 0.45), zorder=1)
    axes.plot(predicted, measured, "o", color=BLUE, label="a split")
    ends = [min(*predicted, *measured), max(*predicted, *measured)]
    axes.plot(ends, ends, color=DARK, linestyle="--", linewidth=1, label="measured = model")
    for point, name, marker, inside, edge in (
        (best, "fastest measured", "s", "none", DARK),
        (chosen, "planner's choice", "*", VERMILION, VERMILION),
    ):
        (mark,) = axes.plot(point.predicted_s / scale, point.median_s / scale, marker, ms=13)
        mark.set(mfc=inside, mec=edge, label=f"{name}: {point.name}")
    axes.set(xlabel=f"step, model ({unit})", ylabel=f"step, measured ({unit})")
    axes.grid()
    add_legend(figure, axes.get_legend_handles_labels()[0])
    return figure
