"""The time of each hop of a placement, by direction and batch size, beside its bytes."""

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from labkit.placement.planner import SplitModel
from labkit.units import as_repeats, check_choice, format_bytes, format_seconds
from workbook.plots.figure import (
    WIDTH_IN,
    CaptionedFigure,
    add_legend,
    add_title,
    drawn,
    joined,
    number_axis,
    quartiles,
    ratio_words,
    repeats_words,
)
from workbook.plots.palette import DARK, SERIES, swatch

if TYPE_CHECKING:
    from labkit.training.measured import MeasuredSplit

_TITLES = {"activation": "Activations, forward", "gradient": "Gradients, backward"}
# In a group of bars: the height of each bar, and the gap between groups.
_BAR_IN, _GAP_IN = 0.155, 0.14


class _Hop(NamedTuple):
    """The bytes and the seconds over one cut, in one direction, at one batch size."""

    group: str
    direction: str
    batch_size: int
    num_bytes: int
    seconds: list[float]
    model_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        text = f"{self.group}, batch {self.batch_size}, {self.direction}".replace("\n", ", ")
        text += f", {format_bytes(self.num_bytes)} in {format_seconds(self.median_s)}"
        return f"{text}, model {format_seconds(self.model_s)}"


def hop_rows(
    placement: str, measured: "MeasuredSplit", predicted: SplitModel
) -> list[dict[str, Any]]:
    """The hops of a measured split, as rows for ``communication_time``.

    Args:
        placement: the name of the split.
        measured: from ``labkit.training.measured.measure_split``.
        predicted: the prediction for the same split.

    Returns:
        One row per cut and direction, without the directions in which nothing is sent.
    """
    ways = [("activation", measured.forward_hop_s, predicted.hop_s)]
    ways += [("gradient", measured.backward_hop_s, predicted.backward_hop_s)]
    return [
        {
            "placement": placement,
            "cut": point,
            "direction": direction,
            "batch_size": measured.batch_size,
            "num_bytes": measured.hop_bytes[cut],
            "seconds": list(seconds[cut]),
            "model_s": model_s[cut],
        }
        for cut, point in enumerate(measured.split_points)
        for direction, seconds, model_s in ways
        # No gradient crosses a cut that has only frozen layers before it.
        if any(seconds[cut])
    ]


@drawn
def communication_time(
    rows: Iterable[Mapping[str, Any]], *, title: str | None = None
) -> CaptionedFigure:
    """Draw the time of every hop, by cut, direction and batch size, beside its bytes.

    Args:
        rows: dicts, as ``hop_rows`` returns them: ``placement`` (its name), ``cut`` (the split
            point), ``direction`` (``activation`` or ``gradient``), ``batch_size``, ``num_bytes``
            and ``seconds`` per batch in that direction (a number, or the repeats: the bar is
            their median, the whisker spans the middle half), and ``model_s``, the prediction.
        title: above the figure.

    Raises:
        ValueError: no rows, an unknown direction, or a time that is not above 0.
    """
    hops = []
    for row in rows:
        group, seconds = f"{row['placement']}\ncut {row['cut']}", as_repeats(row["seconds"])
        check_choice("direction", row["direction"], _TITLES)
        if min(seconds) <= 0:
            raise ValueError(
                f"{group!r} has a hop of {min(seconds):g} s: a logarithmic axis shows times above "
                "0 only; leave out the hops that send nothing"
            )
        sizes = row["batch_size"], row["num_bytes"]
        hops.append(_Hop(group, row["direction"], *sizes, seconds, row["model_s"]))
    if not hops:
        raise ValueError("no hops to draw: give the rows of a split with one cut or more")
    figure = _draw(hops, title or "Communication time by cut")
    most, least = (end(hops, key=lambda hop: hop.num_bytes) for end in (max, min))
    told = "; ".join(map(str, hops))
    if len(hops) > 8:
        told = f"{len(hops)} of them. Most bytes: {most}. Fewest: {least}"
    slow, fast = (end(hops, key=lambda hop: hop.median_s) for end in (max, min))
    ratios = [hop.median_s / hop.model_s for hop in hops]
    caption = joined(
        f"The slowest hop is {slow}; the fastest is {fast}.",
        ratio_words(ratios, "hatched"),
        repeats_words([hop.seconds for hop in hops], "Bars", "steps", "the middle half"),
    )
    return CaptionedFigure(figure, alt=f"Bars of the time over each cut. {told}.", caption=caption)


def _draw(hops: list[_Hop], title: str) -> Figure:
    groups = list(dict.fromkeys(hop.group for hop in hops))
    directions = [name for name in _TITLES if any(hop.direction == name for hop in hops)]
    batches = sorted({hop.batch_size for hop in hops})
    looks = dict(zip(batches, itertools.cycle(style for style, *_ in SERIES)))
    kinds = list(itertools.product(batches, (False, True)))
    group_in = len(kinds) * _BAR_IN + _GAP_IN
    height = _BAR_IN / group_in
    places = {
        (group, *kind): index + (number - (len(kinds) - 1) / 2) * height
        for index, group in enumerate(groups)
        for number, kind in enumerate(kinds)
    }
    figure = Figure(figsize=(WIDTH_IN, len(groups) * group_in + 1.5))
    grid = figure.subplots(1, len(directions) + 1, sharey=True, squeeze=False)[0]
    for axes, direction in zip(grid, directions):
        for hop in (hop for hop in hops if hop.direction == direction):
            look, middle = looks[hop.batch_size], hop.median_s
            place = places[hop.group, hop.batch_size, False]
            axes.barh(place, middle, 0.92 * height, **look.fill)
            low, high = quartiles(hop.seconds)
            spread = [[middle - low], [high - middle]]
            axes.errorbar(middle, place, xerr=spread, color=DARK, capsize=2, linewidth=1)
            _number(axes, high, place, format_seconds(middle))
            place = places[hop.group, hop.batch_size, True]
            axes.barh(place, hop.model_s, 0.92 * height, **look.model.fill)
        if axes is not grid[0]:
            axes.sharex(grid[0])
        axes.set(title=_TITLES[direction], xlabel="time per batch (log scale)")
    # One bar per batch size: both directions carry the same bytes.
    for hop in {(hop.group, hop.batch_size): hop for hop in hops}.values():
        place, look = places[hop.group, hop.batch_size, False], looks[hop.batch_size]
        grid[-1].barh(place, hop.num_bytes, 0.92 * height, **look.fill)
        _number(grid[-1], hop.num_bytes, place, format_bytes(hop.num_bytes))
    _log_axis(grid[0], [t for hop in hops for t in (*hop.seconds, hop.model_s)], 6)
    grid[0].xaxis.set_major_locator(LogLocator(10, numticks=4))
    number_axis(grid[0].xaxis, format_seconds)
    _log_axis(grid[-1], [hop.num_bytes for hop in hops], 8)
    grid[-1].xaxis.set_major_locator(LogLocator(2, numticks=5))
    number_axis(grid[-1].xaxis, format_bytes)
    grid[-1].set(title="Bytes, either way", xlabel="bytes per batch (log scale)")
    for axes in grid:
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
    grid[0].set_yticks(range(len(groups)), groups)
    grid[0].set_ylim(len(groups) - 0.5, -0.5)
    add_title(figure, title)
    entries = [swatch(f"batch {size}", look) for size, look in looks.items()]
    entries += [swatch(f"batch {size} model", look.model) for size, look in looks.items()]
    add_legend(figure, entries)
    return figure


def _log_axis(axes: Axes, values: list[float], room: float) -> None:
    """A bar has no natural start on a logarithmic axis: a third of the least shows each bar."""
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 3, max(values) * room)


def _number(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center_baseline")
