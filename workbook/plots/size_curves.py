"""Curves of time over a size, one per algorithm, beside their models."""

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
# From so many times its model on, a point is marked.
_MISSED = 2


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
            keeps its colour.
        crossover: the size in bytes at which the first two of ``measured`` cross according to a
            model (infinite if they never do). Their measured crossovers are drawn beside it.
    """
    seconds = {name: _repeats(points) for name, points in measured.items()}
    sizes = sorted(set().union(*seconds.values()))
    marks, change = [], ""
    if crossover is not None:
        first, second = list(seconds)[:2]
        found = crossings(seconds[first], seconds[second])
        in_view = [crossover] if sizes[0] <= crossover <= sizes[-1] else []
        marks = [("model", size, _DASHED) for size in in_view]
        marks += [("measured", size, "-") for size in found]
        change = (
            f"{first} and {second} cross at {', '.join(map(format_bytes, found)) or 'no size'}, "
            f"in the model at {format_bytes(crossover) if crossover < math.inf else 'no size'}."
        )
    label, told = "size of the tensor (bytes)", joined(_takeaway(seconds), change)
    return draw_curves(seconds, model or {}, title, label, told, marks, format_bytes)


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
    told = f"Longest in a batch of {most}: {longest}."
    return draw_curves(seconds, model or {}, title, "batch (samples)", told, say_missed=True)


def draw_curves(
    measured: Mapping[str, Repeats],
    predicted: Model,
    title: str,
    label: str,
    told: str,
    marks: Iterable[tuple[str, float, Any]] = (),
    format_size: Callable[[float], str] = str,
    log_time: bool = True,
    say_missed: bool = False,
) -> CaptionedFigure:
    """Draw medians of seconds with a band over all repeats, and predictions as dashed lines.

    ``label`` is that of the axis of the sizes, ``told`` begins the caption, and ``marks`` are
    vertical lines at a crossover: (whose, size, line style). ``say_missed`` writes beside a point
    how many times the link's model it is, from twice on.
    """
    figure, axes = new_axes(4.6, title)
    looks = dict(zip(dict.fromkeys([*measured, *predicted]), itertools.cycle(SERIES)))
    lines = []
    for name, points in measured.items():
        style, marker, _ = looks[name]
        middle, low, high = (list(map(one, points.values())) for one in (median, min, max))
        # A thin line, so that a model that fits stays visible.
        look: dict[str, Any] = {"linewidth": 0.6 if name in predicted else 1.6, "marker": marker}
        lines += axes.plot(list(points), middle, label=name, color=style.color, **look)
        axes.fill_between(list(points), low, high, color=style.color, alpha=0.2, linewidth=0)
    for name, curve in predicted.items():
        look = {"color": looks[name][0].model.ink, "linestyle": _DASHED, "zorder": 3}
        lines += axes.plot(list(curve), list(curve.values()), label=f"{name} model", **look)
    for whose, size, dashes in marks:
        name = f"crossover, {whose}: {format_size(size)}"
        lines.append(axes.axvline(size, color=DARK, linestyle=dashes, label=name))
    _scale(axes, sorted(set().union(*measured.values())), label, format_size, log_time)
    add_legend(figure, lines)
    ratios = {
        (name, x): median(measured[name][x]) / model_s
        for name, curve in predicted.items()
        for x, model_s in curve.items()
        if x in measured.get(name, ())
    }
    missed = {at: ratio for at, ratio in ratios.items() if say_missed and ratio >= _MISSED}
    for (name, x), ratio in missed.items():
        place = {"textcoords": "offset points", "color": looks[name][0].color}
        axes.annotate(f"{ratio:.1f} x", (x, median(measured[name][x])), (6, 4), **place)
    why = "A number beside a point is how many times the model it is. The model leaves out that a "
    why = f"{why}rank is woken for its message, and what else runs." if missed else ""
    repeats = [each for points in measured.values() for each in points.values()]
    spread = repeats_words(repeats, "Points are medians of {} repeats; bands span all of them.")
    ends = [f"{name} {_ends_of(points, format_size)}" for name, points in measured.items()]
    return CaptionedFigure(
        figure,
        alt=f"Curves of time by {label}. {'; '.join(ends)}.",
        caption=joined(told, ratio_words([*ratios.values()], "dashed"), why, spread),
    )


def _scale(
    axes: Any, sizes: list[float], label: str, format_size: Callable[[float], str], log_time: bool
) -> None:
    axes.set_xscale("log", base=2)
    ticks = sizes[:: math.ceil(len(sizes) / 10)]
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


def _ends_of(points: Repeats, format_size: Callable[[float], str]) -> str:
    """The curve in words: its first, its middle and its last size."""
    sizes = list(points)
    few = dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]])
    return ", ".join(f"{format_seconds(median(points[x]))} at {format_size(x)}" for x in few)


def crossings(first: Points, second: Points) -> list[float]:
    """The sizes in bytes at which two measured curves cross.

    Args:
        first, second: ``{size in bytes: seconds, or the list of their repeats}``.

    Returns:
        One size per crossing, from a straight line through the medians of neighbouring sizes on
        logarithmic axes. Noise can cross two curves more than once.
    """
    one, two = _repeats(first), _repeats(second)
    gaps = {size: math.log(median(one[size]) / median(two[size])) for size in one if size in two}
    apart = [(math.log(size), gap) for size, gap in gaps.items() if gap]
    return [
        math.exp(x0 + (x1 - x0) * gap0 / (gap0 - gap1))
        for (x0, gap0), (x1, gap1) in itertools.pairwise(apart)
        if gap0 * gap1 < 0
    ]


def _repeats(points: Points) -> Repeats:
    """The repeats in ascending order of size. JSON has the sizes as strings."""
    return dict(sorted((int(size), as_repeats(seconds)) for size, seconds in points.items()))


def _takeaway(seconds: dict[str, Repeats]) -> str:
    """Which algorithm is fastest at the smallest and at the largest size, and by how much."""
    if len(seconds) == 1:
        return ""
    shared = sorted(set.intersection(*map(set, seconds.values())))
    said = []
    for size in (shared[0], shared[-1]):
        (best_s, best), (next_s, _), *_ = sorted((median(p[size]), n) for n, p in seconds.items())
        ratio = format_number(next_s / best_s)
        said.append(f"{best} at {format_bytes(size)}, {ratio} times as fast as the next")
    return f"Fastest: {'; '.join(said)}."
