"""Curves of time over the size of a tensor, one per algorithm, beside their models."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from labkit.units import as_repeats, format_bytes, format_number, format_seconds
from workbook.plots.figure import (
    CaptionedFigure,
    add_legend,
    drawn,
    joined,
    new_axes,
    number_axis,
    ratio_words,
    repeats_words,
)
from workbook.plots.palette import DARK, SERIES

# {name: {size in bytes: seconds, or the list of their repeats}}
Measured = Mapping[str, Mapping[int, float | Iterable[float]]]
# {name: {size in bytes: seconds}}
Model = Mapping[str, Mapping[int, float]]
Series = dict[str, dict[int, list[float]]]
_DASHED: Any = (0, (5, 3))


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
        between: the two names that the crossover is of; by default the two that have a model, or
            the only two.

    Raises:
        ValueError: nothing to draw; a size or a time that is not above 0; a name in ``between``
            that was not measured.
    """
    seconds = _checked(measured, "measured")
    predicted = _checked(model or {}, "model")
    if not seconds:
        raise ValueError('no curves to draw: give at least one, {"ring": {1024: [1e-4, 2e-4]}}')
    sizes = sorted({*itertools.chain(*seconds.values())})
    figure, axes = new_axes(4.6, title or "Time by size")
    lines = _draw_series(axes, seconds, predicted)
    change = ""
    if crossover is not None:
        names = [name for name in seconds if name in predicted] or list(seconds)
        pair = between or (tuple(names) if len(names) == 2 else ())
        if unknown := sorted({*pair} - seconds.keys()):
            raise ValueError(f"{', '.join(unknown)} is not measured: {', '.join(seconds)} are")
        found = crossings(*(seconds[name] for name in pair)) if pair else []
        is_in_view = sizes[0] <= crossover <= sizes[-1]
        lines += _draw_crossovers(axes, crossover if is_in_view else None, found)
        change = _crossover_words(crossover, is_in_view, pair, found)
    _label_axes(axes, {*itertools.chain(*seconds.values(), *predicted.values())})
    add_legend(figure, lines)
    takeaway = _takeaway(seconds)
    curves = [_ends_of(name, points) for name, points in seconds.items()]
    curves += [_ends_of(_model_name(name), points) for name, points in predicted.items()]
    extent = f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}"
    alt = f"Curves of time by size, {extent}, on logarithmic axes. {'; '.join(curves)}."
    repeats = [each for points in seconds.values() for each in points.values()]
    ratios = [
        statistics.median(seconds[name][size]) / statistics.median(each)
        for name, points in predicted.items()
        for size, each in points.items()
        if size in seconds.get(name, ())
    ]
    spread = repeats_words(repeats, "Points") or "Each point is one measurement."
    caption = joined(takeaway, change, ratio_words(ratios, "dashed"), spread)
    return CaptionedFigure(figure, alt=alt, caption=caption)


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


def _draw_series(axes: Axes, measured: Series, predicted: Series) -> list[Line2D]:
    """Draw measurements with markers, predictions as dashed lines; return the lines."""
    looks = dict(zip(dict.fromkeys([*measured, *predicted]), itertools.cycle(SERIES)))
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
        look: dict[str, Any] = {"color": looks[name][0].model.ink, "linestyle": _DASHED}
        look |= {"marker": "x" if len(points) == 1 else "", "linewidth": 1.6}
        values = [statistics.median(repeats) for repeats in points.values()]
        lines += axes.plot(list(points), values, label=_model_name(name), zorder=3, **look)
    return lines


def _model_name(name: str) -> str:
    return name if name == "model" or name.endswith(" model") else f"{name} model"


def _draw_crossovers(axes: Axes, model: float | None, found: list[float]) -> list[Line2D]:
    lines = []
    if model is not None:
        label = f"crossover, model: {format_bytes(model)}"
        lines.append(axes.axvline(model, label=label, color=DARK, linestyle=_DASHED, lw=1.2))
    measured = [axes.axvline(size, color=DARK, linewidth=1.2) for size in found]
    for line in measured[:1]:
        line.set_label(f"crossover, measured: {', '.join(map(format_bytes, found))}")
    return lines + measured[:1]


def _crossover_words(
    model: float, is_in_view: bool, pair: tuple[str, ...], found: list[float]
) -> str:
    of = f" of {' and '.join(pair)}" if pair else ""
    said = f"The model has no crossover{of}"
    if 0 < model < math.inf:
        where = "" if is_in_view else ", outside the sizes measured"
        said = f"The model puts the crossover{of} at {format_bytes(model)}{where}"
    if not found:
        return f"{said}; none was measured."
    return f"{said}; it was measured at {', '.join(map(format_bytes, found))}."


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
    number_axis(axes.yaxis, format_seconds)
    axes.set(xlabel="size of the tensor (bytes, log scale)", ylabel="time (seconds, log scale)")
    axes.grid()


def _takeaway(seconds: Series) -> str:
    """Which algorithm is fastest at the smallest and at the largest size, and by how much."""
    if len(seconds) < 2:
        return f"{'; '.join(_ends_of(name, row) for name, row in seconds.items())}."
    shared = sorted(set.intersection(*(set(points) for points in seconds.values())))
    said = {}
    for size in dict.fromkeys(shared[:1] + shared[-1:]):
        medians = {name: statistics.median(points[size]) for name, points in seconds.items()}
        best, second, *_ = sorted(medians, key=medians.__getitem__)
        ratio = format_number(medians[second] / medians[best])
        times = "as fast" if ratio == "1" else f"{ratio} times as fast"
        said[size] = f"{best} at {format_bytes(size)}, {times} as the next"
    return f"Fastest: {'; '.join(said.values())}." if said else ""


def _ends_of(name: str, points: dict[int, list[float]]) -> str:
    """The curve in words: its first, its middle and its last size."""
    sizes = list(points)
    chosen = dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]])
    values = (
        f"{format_seconds(statistics.median(points[size]))} at {format_bytes(size)}"
        for size in chosen
    )
    return f"{name} {', '.join(values)}"
