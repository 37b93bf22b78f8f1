"""The time of each hop of a placement, by direction and batch size, beside its bytes."""

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from labkit.placement.planner import SplitModel
from labkit.units import as_repeats, format_bytes, format_seconds
from workbook.plots.figure import WIDTH_IN, CaptionedFigure, add_legend, add_title, drawn
from workbook.plots.palette import DARK, SERIES, Style, swatch
from workbook.plots.repeats import counts_words, quartiles, range_words

if TYPE_CHECKING:
    from labkit.training.split_run import MeasuredSplit

_TITLES = {"activation": "Activations, forward", "gradient": "Gradients, backward"}
# In a group of bars: the height of each bar, and the gap between groups.
_BAR_IN, _GAP_IN = 0.155, 0.14
# {(group, batch size, is a prediction): (position, height) of the bar}
_Places = dict[tuple[str, int, bool], tuple[float, float]]


class _Hop(NamedTuple):
    """The bytes and the seconds over one cut, in one direction, at one batch size."""

    group: str
    direction: str
    batch_size: int
    num_bytes: int
    seconds: list[float]
    model_s: float | None


def hop_rows(
    placement: str, measured: "MeasuredSplit", predicted: SplitModel | None = None
) -> list[dict[str, Any]]:
    """The hops of a measured split, as rows for ``communication_time``.

    Args:
        placement: the name of the split.
        measured: from ``labkit.training.split_run.measure_split``.
        predicted: the prediction for the same split; None leaves it out.

    Returns:
        One row per cut and direction, without the directions in which nothing is sent.
    """
    rows = []
    for cut, point in enumerate(measured.split_points):
        directions = {
            "activation": (measured.forward_hop_s, predicted.hop_s if predicted else None),
            "gradient": (measured.backward_hop_s, predicted.backward_hop_s if predicted else None),
        }
        for direction, (seconds, model_s) in directions.items():
            # No gradient crosses a cut that has only frozen layers before it.
            if any(seconds[cut]):
                row = {"placement": placement, "cut": point, "direction": direction}
                row |= {"batch_size": measured.batch_size, "num_bytes": measured.hop_bytes[cut]}
                row |= {"seconds": list(seconds[cut])}
                rows.append(row | ({"model_s": model_s[cut]} if model_s else {}))
    return rows


@drawn
def communication_time(
    rows: Iterable[Mapping[str, Any]], *, title: str | None = None
) -> CaptionedFigure:
    """Draw the time of every hop, by cut, direction and batch size, beside its bytes.

    Args:
        rows: dicts, as ``hop_rows`` returns them: ``placement`` (its name), ``cut`` (the split
            point), ``direction`` (``activation`` or ``gradient``), ``batch_size``, ``num_bytes``
            and ``seconds`` per batch in that direction (a number, or the repeats: the bar is
            their median, the whisker spans the middle half), and optionally ``model_s``, the
            prediction.
        title: above the figure.

    Raises:
        ValueError: no rows, an unknown direction, or a time that is not above 0.
    """
    hops = [_checked(row) for row in rows]
    if not hops:
        raise ValueError("no hops to draw: give the rows of a split with one cut or more")
    figure = _draw_hops(hops, title or "Communication time by cut")
    return CaptionedFigure(figure, alt=_hops_alt(hops), caption=_hops_caption(hops))


def _checked(row: Mapping[str, Any]) -> _Hop:
    group = f"{row['placement']}\ncut {row['cut']}"
    model_s = row.get("model_s")
    seconds = as_repeats(row["seconds"])
    if row["direction"] not in _TITLES:
        raise ValueError(f"unknown direction {row['direction']!r}: give {' or '.join(_TITLES)}")
    if min(seconds) <= 0 or (model_s is not None and model_s <= 0):
        raise ValueError(
            f"{group!r} has a hop of {min(seconds):g} s, model {model_s}: a logarithmic axis "
            "shows times above 0 only; leave out the hops that send nothing"
        )
    sizes = row["batch_size"], row["num_bytes"]
    return _Hop(group, row["direction"], *sizes, seconds, model_s)


def _draw_hops(hops: list[_Hop], title: str) -> Figure:
    groups = list(dict.fromkeys(hop.group for hop in hops))
    directions = [name for name in _TITLES if any(hop.direction == name for hop in hops)]
    batches = sorted({hop.batch_size for hop in hops})
    looks = dict(zip(batches, itertools.cycle(style for style, *_ in SERIES)))
    has_model = any(hop.model_s is not None for hop in hops)
    bars = len(batches) * (1 + has_model)
    figure = Figure(figsize=(WIDTH_IN, len(groups) * (bars * _BAR_IN + _GAP_IN) + 1.5))
    grid = figure.subplots(1, len(directions) + 1, sharey=True, squeeze=False)[0]
    places = _places(groups, batches, has_model)
    for axes, direction in zip(grid, directions):
        mine = [hop for hop in hops if hop.direction == direction]
        _draw_times(axes, mine, places, looks)
        axes.set(title=_TITLES[direction], xlabel="time per batch (log scale)")
    _draw_bytes(grid[-1], hops, places, looks)
    grid[0].set_yticks(range(len(groups)), groups)
    grid[0].set_ylim(len(groups) - 0.5, -0.5)
    add_title(figure, title)
    entries = [swatch(f"batch {size}", look) for size, look in looks.items()]
    if has_model:
        entries += [swatch(f"batch {size} model", look.model) for size, look in looks.items()]
    add_legend(figure, entries)
    return figure


def _draw_times(axes: Axes, hops: list[_Hop], places: _Places, looks: dict[int, Style]) -> None:
    for hop in hops:
        middle = statistics.median(hop.seconds)
        low, high = quartiles(hop.seconds)
        place, height = places[hop.group, hop.batch_size, False]
        axes.barh(place, middle, height, **looks[hop.batch_size].fill)
        if len(hop.seconds) > 1:
            spread = [[middle - low], [high - middle]]
            axes.errorbar(middle, place, xerr=spread, color=DARK, capsize=2, linewidth=1)
        _number(axes, high, place, format_seconds(middle))
        if hop.model_s is not None:
            place, height = places[hop.group, hop.batch_size, True]
            axes.barh(place, hop.model_s, height, **looks[hop.batch_size].model.fill)
    times = [value for hop in hops for value in (*hop.seconds, hop.model_s) if value]
    axes.set_xscale("log")
    # A bar has no natural start on a logarithmic axis; a third of the least time shows each bar.
    axes.set_xlim(min(times) / 3, max(times) * 6)
    axes.xaxis.set_major_locator(LogLocator(10, numticks=4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    _finish(axes)


def _places(groups: list[str], batches: list[int], has_model: bool) -> _Places:
    kinds = list(itertools.product(batches, (False, True) if has_model else (False,)))
    height = _BAR_IN / (len(kinds) * _BAR_IN + _GAP_IN)
    return {
        (group, *kind): (index + (number - (len(kinds) - 1) / 2) * height, 0.92 * height)
        for index, group in enumerate(groups)
        for number, kind in enumerate(kinds)
    }


def _draw_bytes(axes: Axes, hops: list[_Hop], places: _Places, looks: dict[int, Style]) -> None:
    """One bar per batch size: both directions carry the same bytes."""
    for hop in {(hop.group, hop.batch_size): hop for hop in hops}.values():
        place, height = places[hop.group, hop.batch_size, False]
        axes.barh(place, hop.num_bytes, height, **looks[hop.batch_size].fill)
        _number(axes, hop.num_bytes, place, format_bytes(hop.num_bytes))
    low, high = (end(hop.num_bytes for hop in hops) for end in (min, max))
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 3, high * 8)
    ticks = [2.0**power for power in range(0, 50, 3) if low / 3 < 2**power < high * 2]
    axes.set_xticks(ticks, [format_bytes(tick) for tick in ticks])
    axes.set(title="Bytes, either way", xlabel="bytes per batch (log scale)")
    _finish(axes)


def _number(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center_baseline")


def _finish(axes: Axes) -> None:
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _hops_alt(hops: list[_Hop]) -> str:
    if len(hops) > 8:
        most, least = (end(hops, key=lambda hop: hop.num_bytes) for end in (max, min))
        ends = f"Most bytes: {_in_words(most)}. Fewest: {_in_words(least)}"
        return f"Bars of the time over each cut, {len(hops)} of them. {ends}."
    return f"Bars of the time over each cut. {'; '.join(map(_in_words, hops))}."


def _in_words(hop: _Hop) -> str:
    text = f"{hop.group}, batch {hop.batch_size}, {hop.direction}".replace("\n", ", ")
    text += f", {format_bytes(hop.num_bytes)} in {format_seconds(statistics.median(hop.seconds))}"
    return text if hop.model_s is None else f"{text}, model {format_seconds(hop.model_s)}"


def _hops_caption(hops: list[_Hop]) -> str:
    slow, fast = (end(hops, key=lambda hop: statistics.median(hop.seconds)) for end in (max, min))
    sentences = [f"The slowest hop is {_in_words(slow)}; the fastest is {_in_words(fast)}."]
    ratios = [statistics.median(hop.seconds) / hop.model_s for hop in hops if hop.model_s]
    if ratios:
        sentences.append(f"What was measured is {range_words(ratios)} times the model (hatched).")
    if times := counts_words(hop.seconds for hop in hops):
        sentences.append(f"Bars are medians of {times} steps; whiskers span the middle half.")
    return " ".join(sentences)
