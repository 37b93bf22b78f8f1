"""Parts of figures in which many contenders stand: bars in rows, and a grid of panels."""

import math
from collections.abc import Callable, Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbook.measure.spread import Spread
from workbook.plots.figure import WIDTH_IN, add_title
from workbook.plots.palette import DARK, Style

_COLUMNS = 3


def draw_rows(
    axes: Axes, quantity: str, styles: Iterable[Style], rows: Iterable[list[float] | str]
) -> None:
    """Draw horizontal bars: medians of repeats, their quartiles as whiskers, and the numbers.

    A row may be words, which stand in the place of its bar.
    """
    most = 1e-9
    for place, (style, repeats) in enumerate(zip(styles, rows)):
        beside = {"textcoords": "offset points", "va": "center", "ha": "left"}
        if isinstance(repeats, str):
            axes.annotate(repeats, (0, place), (5, 0), **beside)
            continue
        spread = Spread.of(repeats)
        axes.barh(place, spread.median, 0.72, **style.fill)
        whiskers = [[one] for one in spread.whiskers]
        axes.errorbar(spread.median, place, xerr=whiskers, color=DARK, capsize=3)
        axes.annotate(f"{spread.median:.3g}", (spread.high, place), (5, 0), **beside)
        most = max(most, spread.high)
    # Room for the number beside the longest bar.
    axes.set(xlabel=quantity, xlim=(0, 1.25 * most))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def label_rows(axes: Axes, names: list[str]) -> None:
    """Name the rows, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


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
        is_lowest = number + columns >= len(names)
        axes.set_xlabel(x if is_lowest else "")
        axes.tick_params(labelbottom=is_lowest)
        axes.grid()
    figure.supylabel(y, fontsize=11)
    add_title(figure, title)
    return figure
