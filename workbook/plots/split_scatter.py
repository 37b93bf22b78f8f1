"""Predicted against measured step times of many splits."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from labkit.units import as_repeats, format_count, format_seconds, second_unit
from workbook.plots.figure import CaptionedFigure, add_legend, drawn, new_axes
from workbook.plots.palette import BLUE, DARK, VERMILION, tint
from workbook.plots.repeats import quartiles, range_words


class _Point(NamedTuple):
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
        _Point(_cuts(p["split_points"]), p["predicted_s"], as_repeats(p["measured_s"]))
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
    return CaptionedFigure(
        _draw_scatter(found, chosen, best, title or "Splits, predicted and measured"),
        alt=f"Predicted against measured steps of {len(found)} splits. {' '.join(words)}",
        caption=_scatter_caption(found, chosen, best),
    )


def _cuts(split_points: Sequence[int]) -> str:
    return f"cut {', '.join(map(str, split_points))}" if split_points else "no cut"


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


def _scatter_caption(found: list[_Point], chosen: _Point, best: _Point) -> str:
    if chosen is best:
        text = f"The planner's choice, {chosen.name}, is the fastest that was measured."
    else:
        text = (
            f"The planner chooses {chosen.name}. Its measured step takes "
            f"{chosen.median_s / best.median_s:.2f} times the fastest one, of {best.name}."
        )
    ratios = [point.median_s / point.predicted_s for point in found]
    return f"{text} Measured steps are {range_words(ratios)} times the model's."
