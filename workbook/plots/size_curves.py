"""Curves of time over a size, one per algorithm, beside their predictions."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from matplotlib.ticker import LogLocator

from labkit.units import as_repeats, format_bytes, format_number, format_seconds
from workbook.plots.figure import (
    CaptionedFigure,
    add_legend,
    drawn,
    joined,
    new_axes,
    ratio_words,
    repeats_words,
)
from workbook.plots.palette import DARK, SERIES

# {size: seconds, or the list of their repeats}
Repeats = Mapping[int, list[float]]
Points = Mapping[int, float | Iterable[float]]
Model = Mapping[str, Mapping[int, float]]
_DASHED: Any = (0, (5, 3))
# From so many times its prediction on, a point is marked.
_MISSED = 2
_MISSED_WORDS = (
    "A number beside a point is how many times the prediction it is. The formula leaves out that "
    "a rank is woken for its message, and what else runs."
)


@drawn
def size_curves(
    measured: Mapping[str, Points],
    model: Model | None = None,
    crossover: float | None = None,
    *,
    title: str = "Time by size",
) -> CaptionedFigure:
    """Draw the time of an operation over the size of its tensor.

    Args:
        measured: ``{name: {size in bytes: seconds}}``, seconds as a number or as the list of its
            repeats (the point is their median, the band runs from the smallest to the largest).
        model: ``{name: {size in bytes: predicted seconds}}``; a name that is also in ``measured``
            keeps its color.
        crossover: the size in bytes at which the first two of ``measured`` cross according to a
            model (infinite if they never do). Their measured crossovers are drawn beside it.
    """
    seconds = {name: _repeats(points) for name, points in measured.items()}
    sizes = sorted(set().union(*seconds.values()))
    marks = []
    change = ""
    if crossover is not None:
        first, second = list(seconds)[:2]
        crossed_at = crossings(seconds[first], seconds[second])
        if sizes[0] <= crossover <= sizes[-1]:
            marks.append(("theory", crossover, _DASHED))
        marks += [("measured", size, "-") for size in crossed_at]
        measured_words = ", ".join(map(format_bytes, crossed_at)) or "no size"
        model_words = "no size"
        if crossover < math.inf:
            model_words = format_bytes(crossover)
        change = f"{first} and {second} cross at {measured_words}, in theory at {model_words}."
    label = "size of the tensor (bytes)"
    takeaway = joined(_takeaway(seconds), change)
    return draw_curves(seconds, model or {}, title, label, takeaway, marks, format_bytes)


@drawn
def communication_time(
    measured: Mapping[str, Points],
    model: Model | None = None,
    *,
    title: str = "Communication time by batch size",
) -> CaptionedFigure:
    """Draw the time of what crosses each cut, by direction, over the batch size.

    Args:
        measured, model: ``{"cut 5, forward": {batch size: seconds}}``, as in ``size_curves``.
    """
    seconds = {name: _repeats(points) for name, points in measured.items()}
    most = max(set().union(*seconds.values()))
    longest = max(seconds, key=lambda name: median(seconds[name][most]))
    takeaway = f"Longest in a batch of {most}: {longest}."
    return draw_curves(seconds, model or {}, title, "batch (samples)", takeaway, say_missed=True)


@drawn
def time_by_ranks(
    measured: Mapping[str, Points], predicted: Model, *, title: str = "Time by number of ranks"
) -> CaptionedFigure:
    """Draw the time of an operation over the number of ranks.

    Args:
        measured, predicted: ``{name: {number of ranks: seconds}}``, as in ``size_curves``; a name
            may be in one of them only.
    """
    seconds = {name: _repeats(points) for name, points in measured.items()}
    return draw_curves(seconds, predicted, title, "ranks", "")


def draw_curves(
    measured: Mapping[str, Repeats],
    predicted: Model,
    title: str,
    label: str,
    takeaway: str,
    marks: Iterable[tuple[str, float, Any]] = (),
    format_size: Callable[[float], str] = str,
    log_time: bool = True,
    say_missed: bool = False,
) -> CaptionedFigure:
    """Draw medians of seconds with a band over all repeats, and predictions as dashed lines.

    ``label`` is that of the axis of the sizes, ``takeaway`` begins the caption, and ``marks`` are
    vertical lines at a crossover: (source, size, line style). ``say_missed`` writes beside a point
    how many times its prediction it is, from twice on.
    """
    figure, axes = new_axes(4.6, title)
    looks = dict(zip(dict.fromkeys([*measured, *predicted]), itertools.cycle(SERIES)))
    lines = []
    for name, points in measured.items():
        style, marker, _ = looks[name]
        middle = list(map(median, points.values()))
        low = list(map(min, points.values()))
        high = list(map(max, points.values()))
        # A thin line, so that a model that fits stays visible.
        look: dict[str, Any] = {"linewidth": 0.6 if name in predicted else 1.6, "marker": marker}
        lines += axes.plot(list(points), middle, label=name, color=style.color, **look)
        axes.fill_between(list(points), low, high, color=style.color, alpha=0.2, linewidth=0)
    for name, curve in predicted.items():
        look = {"color": looks[name][0].model.ink, "linestyle": _DASHED, "zorder": 3}
        (line,) = axes.plot(list(curve), list(curve.values()), label=f"{name}, theory", **look)
        if name not in measured:
            lines.append(line)
    if measured.keys() & predicted.keys():
        lines += axes.plot([], [], color=DARK, linestyle=_DASHED, label="theory")
    for source, size, dashes in marks:
        name = f"crossover, {source}: {format_size(size)}"
        lines.append(axes.axvline(size, color=DARK, linestyle=dashes, label=name))
    all_sizes = set().union(*measured.values(), *predicted.values())
    _scale(axes, all_sizes, label, format_size, log_time)
    add_legend(figure, lines)
    ratios = []
    missed = ""
    for name, curve in predicted.items():
        for size in curve.keys() & measured.get(name, {}).keys():
            seconds = median(measured[name][size])
            ratio = seconds / curve[size]
            ratios.append(ratio)
            if say_missed and ratio >= _MISSED:
                missed = _MISSED_WORDS
                beside = {"textcoords": "offset points", "color": looks[name][0].color}
                axes.annotate(f"{ratio:.1f} x", (size, seconds), (6, 4), **beside)
    repeats = itertools.chain(*(points.values() for points in measured.values()))
    spread = repeats_words(repeats, "Points are medians of {} repeats; bands span all of them.")
    return CaptionedFigure(
        figure,
        alt=f"Curves of time by {label}. {_ends(measured, predicted, format_size)}.",
        caption=joined(takeaway, ratio_words(ratios, "dashed"), missed, spread),
    )


def _scale(
    axes: Any, all_sizes: set[int], label: str, format_size: Callable[[float], str], log_time: bool
) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted(all_sizes)[:: math.ceil(len(all_sizes) / 10)]
    axes.set_xticks(ticks, list(map(format_size, ticks)))
    if log_time:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
    else:
        axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(lambda value, _: format_seconds(value))
    axes.minorticks_off()
    axes.set(xlabel=f"{label}, log scale", ylabel=f"time{', log scale' * log_time}")
    axes.grid()


def _ends(
    measured: Mapping[str, Repeats], predicted: Model, format_size: Callable[[float], str]
) -> str:
    """All curves in words; of one that is measured and predicted, the measured one."""
    curves = {name: _repeats(curve) for name, curve in predicted.items()} | dict(measured)
    return "; ".join(f"{name} {_ends_of(points, format_size)}" for name, points in curves.items())


def _ends_of(points: Repeats, format_size: Callable[[float], str]) -> str:
    """The curve in words: its first, its middle and its last size."""
    sizes = list(points)
    parts = []
    for size in dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]]):
        parts.append(f"{format_seconds(median(points[size]))} at {format_size(size)}")
    return ", ".join(parts)


def crossings(first: Points, second: Points) -> list[float]:
    """The sizes in bytes at which two measured curves cross.

    Args:
        first, second: ``{size in bytes: seconds, or the list of their repeats}``.

    Returns:
        One size per crossing, from a straight line through the medians of neighboring sizes on
        logarithmic axes. Noise can cross two curves more than once.
    """
    second = _repeats(second)
    gaps = []
    for size, seconds in _repeats(first).items():
        if size in second:
            gap = math.log(median(seconds) / median(second[size]))
            if gap:
                gaps.append((math.log(size), gap))
    sizes = []
    for (x0, gap0), (x1, gap1) in itertools.pairwise(gaps):
        if gap0 * gap1 < 0:
            sizes.append(math.exp(x0 + (x1 - x0) * gap0 / (gap0 - gap1)))
    return sizes


def _repeats(points: Points) -> Repeats:
    """The repeats in ascending order of size. JSON has the sizes as strings."""
    repeats = {}
    for size in sorted(points, key=int):
        repeats[int(size)] = as_repeats(points[size])
    return repeats


def _takeaway(seconds: dict[str, Repeats]) -> str:
    """The fastest algorithm at the smallest and at the largest size, and by how much it leads."""
    if len(seconds) == 1:
        return ""
    sizes = sorted(set.intersection(*map(set, seconds.values())))
    parts = []
    for size in (sizes[0], sizes[-1]):
        medians_s = {name: median(points[size]) for name, points in seconds.items()}
        best, second, *_ = sorted(medians_s, key=medians_s.__getitem__)
        ratio = format_number(medians_s[second] / medians_s[best])
        parts.append(f"{best} at {format_bytes(size)}, {ratio} times as fast as the next")
    return f"Fastest: {'; '.join(parts)}."
