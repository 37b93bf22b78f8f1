"""The costs of cutting a network into stages, by the formula."""

from collections.abc import Mapping, Sequence
from operator import add
from statistics import median
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.costs.planner import Profile, SplitModel
from labkit.schedules.split_points import stage_bounds
from labkit.units import (
    byte_unit,
    format_bytes,
    format_count,
    format_number,
    format_seconds,
    second_unit,
)
from workbook.plots.figure import WIDTH_IN, CaptionedFigure, add_legend, add_title, drawn
from workbook.plots.palette import BLUE, DARK, STYLES, VERMILION, Style, swatch, tint

if TYPE_CHECKING:
    from labkit.training.measured import MeasuredSplit

_LOOKS = {kind: STYLES[kind] for kind in ("forward", "backward", "activation", "gradient")}
_LOOKS |= {"step": Style(DARK), "memory": Style(BLUE)}


@drawn
def split_costs(profile: Profile, predicted: SplitModel) -> CaptionedFigure:
    """Draw what a split costs: bytes over each cut, memory, and the time of stages and hops.

    Args:
        profile: the model's layers, for the same batch size as the split.
        predicted: from ``labkit.costs.planner.predict_split``, of this profile.
    """
    points = predicted.split_points
    bounds = stage_bounds(points, len(profile.layers))
    name = f"{profile.model} in {format_count(len(points) + 1, 'stage')}, "
    name += f"batch of {profile.batch_size}"
    if predicted.micro_batches > 1:
        name += f" in {predicted.micro_batches} micro-batches ({predicted.schedule})"
    figure = Figure(figsize=(WIDTH_IN, 5.8))
    add_title(figure, name)
    panels: dict[Any, Axes] = figure.subplot_mosaic(
        [["bytes", "memory"], ["stages", "hops" if points else "stages"]],
        width_ratios=[5, 3],
        height_ratios=[2, 3],
    )
    _draw_bytes(panels["bytes"], profile, points)
    memory: dict[str, dict[str, float]] = {}
    times: dict[str, dict[str, float]] = {}
    for stage, (first, end) in enumerate(bounds):
        label = f"stage {stage}\n{first}-{end - 1}"
        memory[label] = {"memory": predicted.memory_bytes[stage]}
        seconds = (predicted.forward_s[stage], predicted.backward_s[stage])
        times[label] = dict(zip(("forward", "backward"), seconds))
    times[f"step\nidle {predicted.bubble:.0%}"] = {"step": predicted.step_s}
    _draw_bars(panels["memory"], "Memory", memory)
    _draw_bars(panels["stages"], "Stages with their layers, and the step", times)
    if points:
        hops: dict[str, dict[str, float]] = {}
        for cut, point in enumerate(points):
            hops[f"cut {point}\n{format_bytes(predicted.hop_bytes[cut])}"] = {
                "activation": predicted.hop_s[cut],
                "gradient": predicted.backward_hop_s[cut],
            }
        _draw_bars(panels["hops"], "Hops, there and back", hops)
    kinds = list(_LOOKS)[: 4 if points else 2]
    add_legend(figure, [swatch(kind, _LOOKS[kind], model=True) for kind in kinds])
    caption = f"{name}. {split_caption(predicted)}"
    return CaptionedFigure(figure, alt=f"Costs of a split: {caption}", caption=caption)


def cuts_words(split_points: Sequence[int]) -> str:
    """``cut before layers 10, 17``."""
    layers = "layers" if len(split_points) > 1 else "layer"
    return f"cut before {layers} {', '.join(map(str, split_points))}"


def split_caption(predicted: SplitModel, measured: "MeasuredSplit | None" = None) -> str:
    """The predicted step of a split, and the measured one."""
    hops_s = sum(predicted.hop_s) + sum(predicted.backward_hop_s)
    stages_s = list(map(add, predicted.forward_s, predicted.backward_s))
    largest_s = max(stages_s)
    text = (
        f"Predicted: the step takes {format_seconds(predicted.step_s)}, with "
        f"{format_seconds(hops_s)} of hops. The largest stage is stage "
        f"{stages_s.index(largest_s)} with {format_seconds(largest_s)}; stages are idle for "
        f"{predicted.bubble:.0%} of the step."
    )
    if measured is None:
        return text
    step_s = median(measured.step_s)
    return (
        f"{text} Measured: {format_seconds(step_s)}, {step_s / predicted.step_s:.2f} times the "
        f"prediction (median of {len(measured.step_s)} steps)."
    )


def _draw_bars(axes: Axes, title: str, bars: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a stacked bar per name: its parts by kind."""
    highest = max(sum(parts.values()) for parts in bars.values())
    scale, unit = byte_unit(highest) if title == "Memory" else second_unit(highest)
    for x, parts in enumerate(bars.values()):
        top = 0.0
        for kind, size in parts.items():
            if size:
                axes.bar(x, size / scale, 0.5, top, label=kind, **_LOOKS[kind].model.fill)
            top += size / scale
        # Short, as bars are narrow.
        words = format_number(top) if top >= 1 else f"{top:.2f}"
        axes.annotate(words, (x, top), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(bars)), list(bars))
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.set(title=title, ylabel=f"{'held' if title == 'Memory' else 'time'} ({unit})")
    # Leave room for a number above the highest bar.
    axes.set(xlim=(-0.5, len(bars) - 0.5), ylim=(0, 1.25 * axes.dataLim.y1))


def _draw_bytes(axes: Axes, profile: Profile, points: Sequence[int]) -> None:
    """Draw the bytes that each possible cut would send; the cuts of this split stand out."""
    sizes = [layer.output_bytes for layer in profile.layers[:-1]]
    scale, unit = byte_unit(max(sizes, default=0))
    for point, size in enumerate(sizes, start=1):
        color = VERMILION if point in points else tint(VERMILION, 0.3)
        axes.bar(point, size / scale, 0.8, color=color)
    axes.set(xlim=(0, len(profile.layers)), title="Bytes over a cut")
    axes.vlines(points, 0, axes.get_ylim()[1], DARK, lw=0.8)
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.set(xlabel="split point (layer behind the cut)", ylabel=f"activation ({unit})")
