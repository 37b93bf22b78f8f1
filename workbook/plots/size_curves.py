"""Curves of time over the size of a tensor, one per algorithm, beside their models."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from labkit.units import as_repeats, format_bytes, format_seconds
from workbook.plots.figure import CaptionedFigure, add_legend, drawn, new_axes
from workbook.plots.palette import DARK, SERIES
from workbook.plots.repeats import counts_words, range_words

# {name: {size in bytes: seconds, or the list of their repeats}}
Measured = Mapping[str, Mapping[int, float | Iterable[float]]]
# {name: {size in bytes: seconds}}
Model = Mapping[str, Mapping[int, float]]
Series = dict[str, dict[int, list[float]]]


class _Win(NamedTuple):
    """The fastest algorithm at one size, and how many times as fast as the second it is."""

    num_bytes: int
    name: str
    ratio: float


class _Crossover(NamedTuple):
    """The sizes in bytes at which the fastest algorithm changes: predicted, and measured."""

    model_bytes: float
    measured_bytes: list[float]
    pair: tuple[str, str] | None
    in_view: bool


@drawn
def size_curves(
    measured: Measured,
    model: Model | None = None,
    crossover: float | None = None,
    *,
    title: str | None = None,
    between: tuple[str, str] | None = None,
) -> CaptionedFigure:
    """Draw the time of an operation over the size of its tensor.

    Args:
        measured: ``{name: {size in bytes: seconds}}``, seconds as a number or as the list of its
            repeats (the point is their median, the band runs from the smallest to the largest).
        model: ``{name: {size in bytes: predicted seconds}}``; a name that is also in ``measured``
            keeps its colour.
        crossover: the size in bytes at which the fastest algorithm changes according to a model
            (infinite if it never does). The measured crossovers are drawn beside it.
        title: above the figure.
        between: the two names that the crossover is of; by default the only two, or the fastest
            at the smallest size and the fastest at the largest.

    Raises:
        ValueError: nothing to draw; a size or a time that is not above 0; a name in ``between``
            that was not measured.
    """
    seconds = _checked(measured, "measured")
    predicted = _checked(model or {}, "model")
    if not seconds:
        raise ValueError('no curves to draw: give at least one, {"ring": {1024: [1e-4, 2e-4]}}')
    wins = _wins(seconds)
    change = _change(seconds, crossover, between, wins)
    takeaway = _takeaway(wins, seconds)
    sentences = [
        takeaway,
        _change_sentence(change),
        _model_sentence(seconds, predicted),
        _repeats_sentence(seconds),
    ]
    return CaptionedFigure(
        _draw(seconds, predicted, change, title or "Time by size"),
        alt=_alt(seconds, predicted, takeaway if wins else ""),
        caption=" ".join(filter(None, sentences)),
    )


def crossings(
    first: Mapping[int, float | Iterable[float]], second: Mapping[int, float | Iterable[float]]
) -> list[float]:
    """The sizes in bytes at which two measured curves cross.

    Args:
        first, second: ``{size in bytes: seconds, or the list of their repeats}``.

    Returns:
        One size per crossing, from a straight line through the medians of neighbouring sizes on
        logarithmic axes. Noise can cross two curves more than once. The list is empty if one
        curve is faster wherever the medians differ, or no size is in both.
    """
    one, two = _checked({"first": first, "second": second}, "measured").values()
    apart = [
        (math.log(size), math.log(statistics.median(one[size]) / statistics.median(two[size])))
        for size in one
        if size in two
    ]
    apart = [(x, gap) for x, gap in apart if gap]
    return [
        math.exp(x0 + (x1 - x0) * gap0 / (gap0 - gap1))
        for (x0, gap0), (x1, gap1) in itertools.pairwise(apart)
        if gap0 * gap1 < 0
    ]


def _checked(series: Measured | Model, what: str) -> Series:
    """``{name: {size: repeats}}`` in ascending order of size. JSON has the sizes as texts."""
    found: Series = {}
    for name, points in series.items():
        by_size = {int(size): as_repeats(repeats) for size, repeats in points.items()}
        if not by_size:
            raise ValueError(f"{what} {name} has no sizes: leave it out, or measure one")
        for size, repeats in by_size.items():
            if size <= 0 or not all(0 < value < math.inf for value in repeats):
                raise ValueError(
                    f"{what} {name} has {repeats} s at {size} bytes: logarithmic axes show sizes "
                    "and times above 0 only"
                )
        found[str(name)] = dict(sorted(by_size.items()))
    return found


def _wins(seconds: Series) -> list[_Win]:
    """The fastest at each size that two or more were measured at, in ascending order of size."""
    wins = []
    for size in sorted({*itertools.chain(*seconds.values())}):
        medians = sorted(
            (statistics.median(points[size]), name)
            for name, points in seconds.items()
            if size in points
        )
        if len(medians) > 1:
            (best, name), (second, _) = medians[:2]
            wins.append(_Win(size, name, second / best))
    return wins


def _change(
    seconds: Series, crossover: float | None, between: tuple[str, str] | None, wins: list[_Win]
) -> _Crossover | None:
    if crossover is None:
        return None
    if between is None and len(seconds) == 2:
        first, second = seconds
        between = first, second
    elif between is None and wins and wins[0].name != wins[-1].name:
        between = wins[0].name, wins[-1].name
    if unknown := sorted({*(between or ())} - seconds.keys()):
        raise ValueError(f"{', '.join(unknown)} is not measured: {', '.join(seconds)} are")
    sizes = {*itertools.chain(*seconds.values())}
    found = crossings(*(seconds[name] for name in between)) if between else []
    in_view = min(sizes) <= crossover <= max(sizes)
    return _Crossover(crossover, found, between, in_view)


def _draw(seconds: Series, predicted: Series, change: _Crossover | None, title: str) -> Figure:
    figure, axes = new_axes(4.6, title)
    lines = _draw_series(axes, seconds, predicted)
    lines += _draw_crossovers(axes, change)
    _label_axes(axes, {*itertools.chain(*seconds.values(), *predicted.values())})
    add_legend(figure, lines)
    return figure


def _draw_series(axes: Axes, measured: Series, predicted: Series) -> list[Line2D]:
    """Draw measurements with markers, predictions as dashed lines; return the lines."""
    names = dict.fromkeys([*measured, *predicted])
    looks = dict(zip(names, itertools.cycle(SERIES)))
    lines = []
    for name, points in measured.items():
        style, marker, _ = looks[name]
        sizes, middle = list(points), [statistics.median(repeats) for repeats in points.values()]
        # A thin line, so that a model that fits stays visible.
        width = 0.6 if name in predicted else 1.6
        lines += axes.plot(sizes, middle, label=name, color=style.color, marker=marker, lw=width)
        low, high = ([end(repeats) for repeats in points.values()] for end in (min, max))
        axes.fill_between(sizes, low, high, color=style.color, alpha=0.2, linewidth=0)
    for name, points in predicted.items():
        look: dict[str, Any] = {"color": looks[name][0].model.ink, "linestyle": (0, (5, 3))}
        look |= {"marker": "x" if len(points) == 1 else "", "linewidth": 1.6}
        values = [statistics.median(repeats) for repeats in points.values()]
        lines += axes.plot(list(points), values, label=_model_name(name), zorder=3, **look)
    return lines


def _model_name(name: str) -> str:
    return name if name == "model" or name.endswith(" model") else f"{name} model"


def _draw_crossovers(axes: Axes, change: _Crossover | None) -> list[Line2D]:
    if change is None:
        return []
    lines = []
    if change.in_view:
        label = f"crossover, model: {format_bytes(change.model_bytes)}"
        lines = [axes.axvline(change.model_bytes, label=label, color=DARK, ls=(0, (5, 3)), lw=1.2)]
    found = [axes.axvline(size, color=DARK, linewidth=1.2) for size in change.measured_bytes]
    if found:
        found[0].set_label(f"crossover, measured: {_sizes(change.measured_bytes)}")
    return lines + found[:1]


def _sizes(sizes: Iterable[float]) -> str:
    return ", ".join(format_bytes(size) for size in sizes)


def _label_axes(axes: Axes, sizes: set[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = (math.log2(end) for end in (min(sizes), max(sizes)))
    every = max(1, math.ceil((high - low) / 9))
    powers = range(math.ceil(low), math.floor(high) + 1, every) or [round(low)]
    axes.set_xticks([2**power for power in powers], [format_bytes(2**power) for power in powers])
    axes.xaxis.set_minor_locator(NullLocator())
    bottom, top = axes.get_ylim()
    # An axis of few decades has few ticks: 2 and 5 are labelled as well.
    subs = (1.0,) if top / bottom > 1000 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(10, subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="size of the tensor (bytes, log scale)", ylabel="time (seconds, log scale)")
    axes.grid()


def _takeaway(wins: list[_Win], seconds: Series) -> str:
    """Which algorithm is fastest at which sizes, and by how much."""
    if not wins:
        return f"{'; '.join(_ends_of(name, row) for name, row in seconds.items())}."
    runs = [list(run) for _, run in itertools.groupby(wins, key=lambda win: win.name)]
    if len(runs) > 3:
        counts = {name: sum(win.name == name for win in wins) for name in seconds}
        told = ", ".join(f"{name} at {count}" for name, count in counts.items() if count)
        last = wins[-1]
        return (
            f"No clear order. Of {len(wins)} sizes, the fastest is {told}. At "
            f"{format_bytes(last.num_bytes)} it is {last.name}, {_times([last])}."
        )
    parts = [
        f"{run[0].name} {_where(run, number, len(runs))}, {_times(run)}"
        for number, run in enumerate(runs)
    ]
    return f"Fastest: {'; '.join(parts)}."


def _where(run: list[_Win], number: int, count: int) -> str:
    first, last = (format_bytes(win.num_bytes) for win in (run[0], run[-1]))
    if len(run) == 1:
        return f"at {first}"
    if count == 1:
        return f"at every size from {first} to {last}"
    if number == 0:
        return f"up to {last}"
    return f"from {first} up" if number == count - 1 else f"from {first} to {last}"


def _times(run: list[_Win]) -> str:
    times = range_words(win.ratio for win in run)
    return "as fast as the next" if times == "1" else f"{times} times as fast as the next"


def _ends_of(name: str, points: dict[int, list[float]]) -> str:
    """The curve in words: its first, its middle and its last size."""
    sizes = list(points)
    chosen = dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]])
    values = (
        f"{format_seconds(statistics.median(points[size]))} at {format_bytes(size)}"
        for size in chosen
    )
    return f"{name} {', '.join(values)}"


def _change_sentence(change: _Crossover | None) -> str:
    if change is None:
        return ""
    pair = f" of {' and '.join(change.pair)}" if change.pair else ""
    said = f"The model has no crossover{pair}"
    if 0 < change.model_bytes < math.inf:
        where = "" if change.in_view else ", outside the sizes measured"
        said = f"The model puts the crossover{pair} at {format_bytes(change.model_bytes)}{where}"
    if not change.measured_bytes:
        return f"{said}; none was measured."
    return f"{said}; it was measured at {_sizes(change.measured_bytes)}."


def _model_sentence(seconds: Series, predicted: Series) -> str:
    if not predicted:
        return ""
    ratios = [
        statistics.median(seconds[name][size]) / statistics.median(repeats)
        for name, points in predicted.items()
        for size, repeats in points.items()
        if size in seconds.get(name, ())
    ]
    if not ratios:
        return "Dashed lines are models."
    return f"Measured times are {range_words(ratios)} times the model's (dashed)."


def _repeats_sentence(seconds: Series) -> str:
    times = counts_words(repeats for points in seconds.values() for repeats in points.values())
    if not times:
        return "Each point is one measurement."
    return f"Points are medians of {times} repeats; bands span all of them."


def _alt(seconds: Series, predicted: Series, takeaway: str) -> str:
    sizes = sorted({*itertools.chain(*seconds.values())})
    curves = [_ends_of(name, points) for name, points in seconds.items()]
    curves += [_ends_of(_model_name(name), points) for name, points in predicted.items()]
    return (
        f"Curves of time by size, {format_bytes(sizes[0])} to "
        f"{format_bytes(sizes[-1])}, on logarithmic axes. {'; '.join(curves)}. {takeaway}"
    ).rstrip()
