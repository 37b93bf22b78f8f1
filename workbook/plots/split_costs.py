"""What it costs to cut a network into stages: predicted costs beside measured ones."""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING, Any

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
    ratio_words,
)
from workbook.plots.palette import BLUE, DARK, STYLES, VERMILION, Style, swatch, tint

if TYPE_CHECKING:
    from labkit.training.measured import MeasuredSplit

_LOOKS = {kind: STYLES[kind] for kind in ("forward", "backward", "activation", "gradient")}
_LOOKS |= {"step": Style(DARK), "memory": Style(BLUE)}
# A stacked bar: by kind, the repeats of its parts.
Bar = dict[str, Sequence[float]]


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
        ValueError: the measured split is another one.
    """
    points, idle = predicted.split_points, f"{predicted.bubble:.0%}"
    bounds = stage_bounds(points, len(profile.layers))
    if measured is not None:
        ours = points, predicted.micro_batches, profile.batch_size
        theirs = tuple(measured.split_points), measured.micro_batches, measured.batch_size
        if ours != theirs:
            raise ValueError(f"predicted is {ours} (split points, M, batch), measured is {theirs}")
    name = f"{profile.model} in {format_count(len(points) + 1, 'stage')}, "
    name += f"batch of {profile.batch_size}"
    if predicted.micro_batches > 1:
        name += f" in {predicted.micro_batches} micro-batches ({predicted.schedule})"
    figure = Figure(figsize=(WIDTH_IN, 5.8))
    add_title(figure, title or name)
    panels: dict[Any, Axes] = figure.subplot_mosaic(
        [["bytes", "memory"], ["stages", "hops" if points else "stages"]],
        width_ratios=[5, 3],
        height_ratios=[2, 3],
    )
    _draw_bytes(panels["bytes"], profile, points)
    stages = [f"stage {s}\n{low}-{high - 1}" for s, (low, high) in enumerate(bounds)]
    splits = [_bars(split) for split in (predicted, measured) if split]
    hops = [f"cut {p}\n{format_bytes(b)}" for p, b in zip(points, predicted.hop_bytes)]
    for panel, panel_title, names in (
        ("memory", "Memory", stages),
        ("stages", "Stages with their layers, and the step", [*stages, f"step\nidle {idle}"]),
        ("hops", "Hops, there and back", hops),
    ):
        if panel in panels:
            _draw_bars(panels[panel], panel_title, names, [split[panel] for split in splits])
    looks = list(_LOOKS.items())[: 4 if points else 2]
    entries = [swatch(kind, look, model=True) for kind, look in looks]
    add_legend(figure, entries + [swatch(kind, look) for kind, look in looks if measured])
    caption = f"{name}. {split_caption(predicted, measured)}"
    return CaptionedFigure(figure, alt=f"Costs of a split: {caption}", caption=caption)


def cuts_words(split_points: Sequence[int]) -> str:
    """``cut before layers 10, 17``."""
    return f"cut before layer{'s' * (len(split_points) > 1)} {', '.join(map(str, split_points))}"


def split_caption(predicted: SplitModel, measured: "MeasuredSplit | None" = None) -> str:
    """The predicted step of a split, and the measured one."""
    hops_s = sum(predicted.hop_s) + sum(predicted.backward_hop_s)
    stages_s = [f + b for f, b in zip(predicted.forward_s, predicted.backward_s)]
    largest_s = max(stages_s)
    text = (
        f"Model: the step takes {format_seconds(predicted.step_s)}, with {format_seconds(hops_s)} "
        f"of hops. The largest stage is stage {stages_s.index(largest_s)} with "
        f"{format_seconds(largest_s)}; stages are idle for {predicted.bubble:.0%} of the step."
    )
    if measured is None:
        return text
    step_s = median(measured.step_s)
    return (
        f"{text} Measured: {format_seconds(step_s)}, {step_s / predicted.step_s:.2f} times the "
        f"model (median of {len(measured.step_s)} steps; whiskers span the middle half)."
    )


def _bars(split: "SplitModel | MeasuredSplit") -> dict[str, list[Bar]]:
    """A split as bars: seconds of stages and step, seconds of hops, and bytes of memory."""
    if isinstance(split, SplitModel):
        steps: Sequence[float] = [split.step_s]
        hops = [([there], [back]) for there, back in zip(split.hop_s, split.backward_hop_s)]
    else:
        steps, hops = split.step_s, list(zip(split.forward_hop_s, split.backward_hop_s))
    stages: list[Bar] = [
        {"forward": [f], "backward": [b]} for f, b in zip(split.forward_s, split.backward_s)
    ]
    return {
        "stages": [*stages, {"step": steps}],
        # There are no times where no gradient crosses.
        "hops": [{"activation": there, "gradient": back or [0.0]} for there, back in hops],
        "memory": [{"memory": [size]} for size in split.memory_bytes],
    }


def _draw_bars(axes: Axes, title: str, names: list[str], columns: list[list[Bar]]) -> None:
    """Draw one group of bars per name, measured right of predicted."""
    highest = max(sum(map(median, parts.values())) for bars in columns for parts in bars)
    scale, unit = byte_unit(highest) if title == "Memory" else second_unit(highest)
    shifts, width = ((-0.22, 0.22), 0.42) if len(columns) == 2 else ((0.0,), 0.5)
    for bars, is_model, shift in zip(columns, (True, False), shifts):
        for place, parts in enumerate(bars):
            x, top, end = place + shift, 0.0, 0.0
            for kind, repeats in parts.items():
                low, size, high = np.quantile(repeats, (0.25, 0.5, 0.75)) / scale
                style = _LOOKS[kind].model if is_model else _LOOKS[kind]
                if size:
                    axes.bar(x, size, width, top, label=kind, **style.fill)
                if low < high:
                    axes.plot([x, x], [top + low, top + high], color=DARK, lw=0.8, marker="_")
                top, end = top + size, top + high
            # Short, as bars are narrow.
            words = format_number(top) if top >= 1 else f"{top:.2f}"
            axes.annotate(words, (x, end), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.set(title=title, ylabel=f"{'held' if title == 'Memory' else 'time'} ({unit})")
    # Leave room for a number above the highest bar.
    axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(0, 1.25 * axes.dataLim.y1))


def _draw_bytes(axes: Axes, profile: Profile, points: Sequence[int]) -> None:
    """Draw the bytes that each possible cut would send; the cuts of this split stand out."""
    places = range(1, len(profile.layers))
    sizes = [layer.output_bytes for layer in profile.layers[:-1]]
    scale, unit = byte_unit(max(sizes, default=0))
    tops = [size / scale for size in sizes]
    colors = [VERMILION if i in points else tint(VERMILION, 0.3) for i in places]
    axes.bar(places, tops, 0.8, color=colors)
    axes.set(xlim=(0, len(profile.layers)), title="Bytes over a cut")
    axes.vlines(points, 0, axes.get_ylim()[1], DARK, lw=0.8)
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.set(xlabel="split point (layer behind the cut)", ylabel=f"activation ({unit})")


@drawn
def split_scatter(
    points: Iterable[Mapping[str, Any]], *, title: str = "Splits, predicted and measured"
) -> CaptionedFigure:
    """Draw predicted against measured step times of many splits, to see if the planner is right.

    Args:
        points: dicts with ``split_points``, ``predicted_s`` and ``measured_s`` of each split:
            seconds per step, measured as a number or as its repeats (the point is their median,
            the whisker spans the middle half).
        title: above the figure.
    """
    found = [
        {
            "name": f"cut {', '.join(map(str, p['split_points']))}",
            "predicted": p["predicted_s"],
            "measured": median(as_repeats(p["measured_s"])),
            "quartiles": np.quantile(as_repeats(p["measured_s"]), (0.25, 0.75)),
        }
        for p in points
    ]
    scale, unit = second_unit(max(point["measured"] for point in found))
    figure, axes = new_axes(4.8, title)
    predicted = np.array([point["predicted"] for point in found]) / scale
    measured = np.array([point["measured"] for point in found]) / scale
    low, high = np.transpose([point["quartiles"] for point in found]) / scale
    axes.vlines(predicted, low, high, tint(BLUE, 0.45), zorder=1)
    axes.plot(predicted, measured, "o", color=BLUE, label="a split")
    start = (predicted.min(), predicted.min())
    axes.axline(start, slope=1, color=DARK, linestyle="--", label="measured = model")
    best, chosen = (min(found, key=itemgetter(key)) for key in ("measured", "predicted"))
    marks = {"fastest measured": (best, "s", "none"), "planner's choice": (chosen, "*", VERMILION)}
    for name, (point, marker, inside) in marks.items():
        place = point["predicted"] / scale, point["measured"] / scale
        look = {"ms": 13, "mfc": inside, "mec": DARK, "label": f"{name}: {point['name']}"}
        axes.plot(*place, marker, **look)
    axes.set(xlabel=f"step, model ({unit})", ylabel=f"step, measured ({unit})")
    axes.grid()
    add_legend(figure, axes.get_legend_handles_labels()[0])
    slower = chosen["measured"] / best["measured"]
    text = (
        f"The planner chooses {chosen['name']}, whose step takes {slower:.2f} times that of the "
    )
    text += f"fastest split that was measured, {best['name']}."
    ratios = [point["measured"] / point["predicted"] for point in found]
    return CaptionedFigure(
        figure,
        alt=f"Predicted against measured steps of {len(found)} splits. {text}",
        caption=joined(text, ratio_words(ratios, "dashed line")),
    )
