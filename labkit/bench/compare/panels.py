"""Small multiples: a panel per technique, ours beside PyTorch's, with one device as a reference.

A dozen contenders in one pair of axes cannot be told apart; in panels with common axes a few looks
suffice, and they mean the same in each panel.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.bench.spread import Spread
from labkit.plots.figure import WIDTH_IN, add_legend, add_title
from labkit.plots.palette import DARK, GRID, SERIES, Style, swatch

OURS, THEIRS, THEIRS_ON_OURS, ONE = "labkit", "PyTorch", "PyTorch on labkit", "one device"
LOOKS: dict[str, tuple[Style, str, Any]] = dict(
    zip((OURS, THEIRS, THEIRS_ON_OURS), SERIES, strict=False)
) | {ONE: (Style(DARK), "", ":")}
_COLUMNS = 3

# By look, by x: the repeats.
Lines = Mapping[str, Mapping[int, list[float]]]


class Axis(NamedTuple):
    """An axis: its name with the unit, and whether each doubling is one step."""

    label: str
    doubling: bool = False


def draw_panels(panels: Mapping[str, Lines], x: Axis, y: Axis, title: str) -> Figure:
    """Lines through medians, with quartiles as whiskers; a panel for each key of ``panels``."""
    rows = math.ceil(len(panels) / _COLUMNS)
    figure = Figure(figsize=(WIDTH_IN, 1.3 + 2.2 * rows))
    columns = min(_COLUMNS, len(panels))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, lines) in zip(grid.flat, panels.items()):
        for look, points in lines.items():
            _draw_line(axes, look, points)
        axes.set_title(name, fontsize=10)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    ticks = sorted({at for lines in panels.values() for points in lines.values() for at in points})
    for number, axes in enumerate(grid.flat):
        _finish(axes, x, ticks, lowest=number + columns >= len(panels))
    figure.supylabel(y.label, fontsize=11)
    add_title(figure, title)
    present = [look for look in LOOKS if any(look in lines for lines in panels.values())]
    add_legend(figure, [_entry(look) for look in present])
    return figure


def _draw_line(axes: Axes, look: str, points: Mapping[int, list[float]]) -> None:
    style, marker, line = LOOKS[look]
    spreads = [Spread.of(repeats) for repeats in points.values()]
    if look == ONE and len(points) == 1:
        # One device does not vary with x: a line across the panel.
        axes.axhline(spreads[0].median, color=style.color, linestyle=line, linewidth=1.4)
        return
    middle = [spread.median for spread in spreads]
    whiskers = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    axes.errorbar(
        list(points),
        middle,
        whiskers,
        color=style.color,
        marker=marker,
        linestyle=line,
        linewidth=1.4,
        markersize=5,
        capsize=3,
    )


def _finish(axes: Axes, x: Axis, ticks: list[int], *, lowest: bool) -> None:
    if x.doubling:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.tick_params(labelbottom=lowest)
    axes.set_xlabel(x.label if lowest else "")
    axes.margins(x=0.08)
    axes.set_ylim(bottom=0)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def _entry(look: str) -> Line2D:
    style, marker, line = LOOKS[look]
    return Line2D([], [], color=style.color, marker=marker, linestyle=line, label=look)


def draw_rows(
    columns: Mapping[str, Mapping[str, list[float] | None]],
    looks: Mapping[str, str],
    missing: str,
    title: str,
) -> Figure:
    """Horizontal bars: a row per contender, a panel per quantity; ``missing`` stands for None.

    Args:
        columns: by quantity with its unit, by contender: the repeats.
        looks: by contender, its look.
    """
    names = list(looks)
    figure = Figure(figsize=(WIDTH_IN, 1.5 + 0.34 * len(names)))
    grid = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, (quantity, rows) in zip(grid, columns.items()):
        spreads = {name: Spread.of(repeats) for name in names if (repeats := rows[name])}
        for place, name in enumerate(names):
            if name in spreads:
                _draw_row(axes, place, spreads[name], _patch(looks[name]))
            else:
                axes.text(0, place, f" {missing}", va="center")
        axes.set_xlabel(quantity)
        # Room for the number beside the longest bar.
        axes.set_xlim(0, 1.2 * max((spread.high for spread in spreads.values()), default=1.0))
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
    grid[0].set_yticks(range(len(names)), names)
    grid[0].set_ylim(len(names) - 0.5, -0.5)
    add_title(figure, title)
    add_legend(figure, [_patch(look) for look in LOOKS if look in looks.values()])
    return figure


def _draw_row(axes: Axes, place: int, spread: Spread, look: Patch) -> None:
    axes.barh(
        place,
        spread.median,
        height=0.72,
        facecolor=look.get_facecolor(),
        edgecolor=look.get_edgecolor(),
        hatch=look.get_hatch(),
        linewidth=0,
    )
    whiskers = [[spread.median - spread.low], [spread.high - spread.median]]
    axes.errorbar(spread.median, place, xerr=whiskers, color=DARK, capsize=3, linewidth=1.2)
    beside = {"textcoords": "offset points", "va": "center", "ha": "left"}
    axes.annotate(f"{spread.median:.3g}", (spread.high, place), (5, 0), **beside)


def _patch(look: str) -> Patch:
    return swatch(look, LOOKS[look][0])
