"""Small multiples: a panel per technique, ours beside PyTorch's, with one device as a reference.

A dozen contenders in one pair of axes cannot be told apart; in panels with common axes a few looks
suffice, and they mean the same in each panel.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workbook.measure.spread import Spread
from workbook.plots.figure import WIDTH_IN, add_legend, add_title
from workbook.plots.palette import DARK, SERIES, Style, swatch

OURS, THEIRS, THEIRS_ON_OURS, ONE = "labkit", "PyTorch", "PyTorch on labkit", "one device"
LOOKS: dict[str, tuple[Style, str, Any]] = dict(
    zip((OURS, THEIRS, THEIRS_ON_OURS), SERIES, strict=False)
) | {ONE: (Style(DARK), "", ":")}
_COLUMNS = 3

# {look: {x: repeats}}
Lines = Mapping[str, Mapping[int, list[float]]]


def draw_grid(
    names: Iterable[str], draw: Callable[[Axes, str], None], x: str, y: str, title: str
) -> Figure:
    """A panel for each name, drawn by ``draw(axes, name)``, with common axes."""
    names = list(names)
    rows, columns = math.ceil(len(names) / _COLUMNS), min(_COLUMNS, len(names))
    figure = Figure(figsize=(WIDTH_IN, 1.3 + 2.2 * rows))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    for number, (axes, name) in enumerate(zip(grid.flat, names)):
        draw(axes, name)
        axes.set_title(name, fontsize=10)
        lowest = number + columns >= len(names)
        axes.set_xlabel(x if lowest else "")
        axes.tick_params(labelbottom=lowest)
        axes.grid()
    figure.supylabel(y, fontsize=11)
    add_title(figure, title)
    return figure


def draw_panels(
    panels: Mapping[str, Lines], x: str, y: str, title: str, *, doubling: bool = False
) -> Figure:
    """Draw lines through medians, with quartiles as whiskers; a panel for each key of ``panels``.

    Args:
        panels: ``{title of the panel: {look: {x: repeats}}}``.
        x, y: the axes' names with their units.
        title: above the figure.
        doubling: the x axis is logarithmic, so that each doubling is one step.
    """
    ticks = sorted({at for lines in panels.values() for points in lines.values() for at in points})

    def line(look: str) -> dict[str, Any]:
        style, marker, stroke = LOOKS[look]
        return {"color": style.color, "marker": marker, "linestyle": stroke, "linewidth": 1.4}

    def draw(axes: Axes, name: str) -> None:
        for look, points in panels[name].items():
            spreads = [Spread.of(repeats) for repeats in points.values()]
            if look == ONE and len(points) == 1:
                # One device does not vary with x: a line across the panel.
                axes.axhline(spreads[0].median, **line(look))
                continue
            whiskers = list(zip(*(spread.whiskers for spread in spreads)))
            middle = [spread.median for spread in spreads]
            axes.errorbar(list(points), middle, whiskers, markersize=5, capsize=3, **line(look))
        if doubling:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.margins(x=0.08)
        axes.set_ylim(bottom=0)

    figure = draw_grid(panels, draw, x, y, title)
    present = [look for look in LOOKS if any(look in lines for lines in panels.values())]
    add_legend(figure, [Line2D([], [], label=look, **line(look)) for look in present])
    return figure


def draw_rows(
    columns: Mapping[str, Mapping[str, list[float] | None]],
    looks: Mapping[str, str],
    missing: str,
    title: str,
) -> Figure:
    """Draw horizontal bars: a row per contender, a panel per quantity.

    Args:
        columns: ``{quantity with its unit: {contender: repeats, or None}}``.
        looks: ``{contender: look}``, in the order of the rows.
        missing: the text in the place of a bar where the repeats are None.
        title: above the figure.
    """
    figure = Figure(figsize=(WIDTH_IN, 1.5 + 0.34 * len(looks)))
    grid = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, (quantity, rows) in zip(grid, columns.items()):
        most = 1.0
        for place, name in enumerate(looks):
            if not (repeats := rows[name]):
                axes.text(0, place, f" {missing}", va="center")
                continue
            spread = Spread.of(repeats)
            axes.barh(place, spread.median, 0.72, **LOOKS[looks[name]][0].fill)
            whiskers = [[one] for one in spread.whiskers]
            axes.errorbar(spread.median, place, xerr=whiskers, color=DARK, capsize=3)
            beside = {"textcoords": "offset points", "va": "center", "ha": "left"}
            axes.annotate(f"{spread.median:.3g}", (spread.high, place), (5, 0), **beside)
            most = max(most, spread.high)
        axes.set_xlabel(quantity)
        # Room for the number beside the longest bar.
        axes.set_xlim(0, 1.2 * most)
        axes.grid(axis="x")
    grid[0].set_yticks(range(len(looks)), list(looks))
    grid[0].set_ylim(len(looks) - 0.5, -0.5)
    add_title(figure, title)
    present = [look for look in LOOKS if look in looks.values()]
    add_legend(figure, [swatch(look, LOOKS[look][0]) for look in present])
    return figure
