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
from workbook.plots.palette import DARK, SERIES, swatch


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
            ``model`` predicts ``measured``, and ``ours model`` predicts ``ours``.
        quantity: the name of the axis.
        unit: ``s`` and ``bytes`` are scaled to a readable unit (ms, MiB), other units are not.
    """
    repeats = {
        group: {name: as_repeats(value) for name, value in row.items()}
        for group, row in groups.items()
    }
    medians = {(g, n): median(values) for g, row in repeats.items() for n, values in row.items()}
    largest = max(map(abs, medians.values()))
    units = {"s": second_unit(largest), "bytes": byte_unit(largest)}
    scale, shown_unit = units.get(unit, (1.0, unit))
    # A model has the colour of the series that it predicts, and stands beside it.
    names = list(dict.fromkeys(name for _, name in medians))
    looks = dict(zip(dict.fromkeys(map(_base, names)), itertools.cycle(s for s, *_ in SERIES)))
    styles = {name: looks.get(name) or looks[_base(name)].model for name in names}
    figure, axes = new_axes(4.2, title)
    width = min(0.8 / len(names), 0.28)
    for (group, name), middle in medians.items():
        x = list(repeats).index(group) + (names.index(name) - (len(names) - 1) / 2) * width
        middle, low, high = (one(repeats[group][name]) / scale for one in (median, min, max))
        axes.bar(x, middle, 0.92 * width, label=name, **styles[name].fill)
        if low < high:
            spread = [[middle - low], [high - middle]]
            axes.errorbar(x, middle, spread, color=DARK, capsize=4, linewidth=1.2)
        if len(medians) <= 12:
            above = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
            axes.annotate(format_number(middle), (x, max(high, 0)), (0, 3), **above)
    wrap = partial(textwrap.fill, width=min(16, 88 // len(repeats)), break_long_words=False)
    axes.set_xticks(range(len(repeats)), [*map(wrap, repeats)])
    axes.set(xlim=(-0.6, len(repeats) - 0.4), ylabel=f"{quantity} ({shown_unit})")
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    axes.margins(y=0.12)
    add_legend(figure, [swatch(name, style) for name, style in styles.items()])

    parts = [
        f"{group}: {', '.join(f'{n} {format_value(medians[group, n], unit)}' for n in row)}"
        for group, row in repeats.items()
    ]
    alt = f"Bars of {quantity}. {'; '.join(parts)}."
    return CaptionedFigure(figure, alt=alt, caption=_caption(repeats))


def _base(name: str) -> str:
    """The series that a model predicts, or the series itself."""
    return "measured" if name == "model" else name.removesuffix(" model")


def _caption(repeats: dict[str, dict[str, list[float]]]) -> str:
    ratios = [
        median(row[_base(name)]) / model
        for row in repeats.values()
        for name in row
        if name != _base(name) in row and (model := median(row[name]))
    ]
    every = [each for row in repeats.values() for name, each in row.items() if name == _base(name)]
    spread = repeats_words(every, "Bars are medians of {} repeats; whiskers span all of them.")
    words = joined(ratio_words(ratios, "hatched"), spread)
    return words or "Each bar is one value, not a median of repeats."
