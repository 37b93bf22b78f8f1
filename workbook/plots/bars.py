"""Bars of one quantity: measured values beside predictions."""

import itertools
import textwrap
from collections.abc import Iterable, Mapping
from functools import partial
from statistics import median

from labkit.units import as_repeats, byte_unit, format_number, format_value, second_unit
from workbook.plots.figure import (
    CaptionedFigure,
    add_legend,
    drawn,
    joined,
    new_axes,
    ratio_words,
    repeats_words,
)
from workbook.plots.palette import DARK, SERIES, Style, swatch


@drawn
def bars(
    groups: Mapping[str, Mapping[str, float | Iterable[float]]],
    *,
    quantity: str,
    unit: str,
    title: str = "",
) -> CaptionedFigure:
    """Draw one quantity as groups of bars, measured values beside predictions.

    Args:
        groups: ``{group: {series: value}}``. A value is a number, or the list of its repeats (the
            bar is their median, the whisker runs from the smallest to the largest). The series
            ``predicted`` predicts ``measured``, and ``ours predicted`` predicts ``ours``.
        quantity: the name of the axis.
        unit: ``s`` and ``bytes`` are scaled to a readable unit (ms, MiB), other units are not.
    """
    repeats: dict[str, dict[str, list[float]]] = {}
    medians: dict[str, dict[str, float]] = {}
    for group, values_by_name in groups.items():
        repeats[group] = {name: as_repeats(value) for name, value in values_by_name.items()}
        medians[group] = {name: median(values) for name, values in repeats[group].items()}
    num_bars = sum(map(len, repeats.values()))
    largest = max(map(abs, itertools.chain(*map(dict.values, medians.values()))))
    units = {"s": second_unit(largest), "bytes": byte_unit(largest)}
    scale, shown_unit = units.get(unit, (1.0, unit))
    styles = _styles(dict.fromkeys(itertools.chain(*repeats.values())))
    names = list(styles)
    figure, axes = new_axes(4.2, title)
    width = min(0.8 / len(names), 0.28)
    for number, (group, values_by_name) in enumerate(repeats.items()):
        for name, values in values_by_name.items():
            x = number + (names.index(name) - (len(names) - 1) / 2) * width
            middle = medians[group][name] / scale
            low = min(values) / scale
            high = max(values) / scale
            axes.bar(x, middle, 0.92 * width, label=name, **styles[name].fill)
            if low < high:
                spread = [[middle - low], [high - middle]]
                axes.errorbar(x, middle, spread, color=DARK, capsize=4, linewidth=1.2)
            if num_bars <= 12:
                above = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
                axes.annotate(format_number(middle), (x, max(high, 0)), (0, 3), **above)
    wrap = partial(textwrap.fill, width=min(16, 88 // len(repeats)), break_long_words=False)
    axes.set_xticks(range(len(repeats)), list(map(wrap, repeats)))
    axes.set(xlim=(-0.6, len(repeats) - 0.4), ylabel=f"{quantity} ({shown_unit})")
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    axes.margins(y=0.12)
    add_legend(figure, [swatch(name, style) for name, style in styles.items()])

    parts = []
    for group, medians_by_name in medians.items():
        values = [f"{name} {format_value(value, unit)}" for name, value in medians_by_name.items()]
        parts.append(f"{group}: {', '.join(values)}")
    alt = f"Bars of {quantity}. {'; '.join(parts)}."
    return CaptionedFigure(figure, alt=alt, caption=_caption(repeats))


def _styles(names: Mapping[str, object]) -> dict[str, Style]:
    """The look of each series: a prediction has the color of the series that it predicts."""
    looks = dict(zip(dict.fromkeys(map(_base, names)), itertools.cycle(SERIES)))
    styles = {}
    for name in names:
        style, *_ = looks[_base(name)]
        styles[name] = style
        if name != _base(name):
            styles[name] = style.model
    return styles


def _base(name: str) -> str:
    """The series that is predicted, or the series itself."""
    return "measured" if name == "predicted" else name.removesuffix(" predicted")


def _caption(repeats: dict[str, dict[str, list[float]]]) -> str:
    ratios = []
    measured = []
    for values_by_name in repeats.values():
        for name, values in values_by_name.items():
            base = _base(name)
            if name == base:
                measured.append(values)
            elif base in values_by_name and median(values):
                ratios.append(median(values_by_name[base]) / median(values))
    spread = repeats_words(measured, "Bars are medians of {} repeats; whiskers span all of them.")
    words = joined(ratio_words(ratios, "hatched"), spread)
    return words or "Each bar is one value, not a median of repeats."
