"""Bars of one quantity: measured values beside predictions."""

import itertools
import statistics
import textwrap
from collections.abc import Iterable, Mapping

from matplotlib.figure import Figure

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

# {group: {series: repeats}}
Repeats = dict[str, dict[str, list[float]]]


@drawn
def bars(
    groups: Mapping[str, Mapping[str, float | Iterable[float]]],
    *,
    quantity: str,
    unit: str,
    title: str | None = None,
) -> CaptionedFigure:
    """Draw one quantity as groups of bars, measured values beside predictions.

    Args:
        groups: ``{group: {series: value}}``. A value is a number, or the list of its repeats (the
            bar is their median, the whisker runs from the smallest to the largest). A series
            called ``model``, or ending in `` model``, is a prediction:
            ``{"ring": {"measured": [...], "model": 0.1}}``, or
            ``{"1 MiB": {"ours": [...], "gloo": [...], "ours model": 0.1}}``.
        quantity: the name of the axis.
        unit: ``s`` and ``bytes`` are scaled to a readable unit (ms, MiB), other units are not.
        title: above the figure.

    Raises:
        ValueError: nothing to draw; a value that is not a number.
    """
    repeats = {
        str(group): {name: as_repeats(value) for name, value in row.items()}
        for group, row in groups.items()
    }
    if not any(repeats.values()):
        raise ValueError(
            'no bars to draw: give groups of series, {"ring": {"measured": [0.9, 1.1]}}'
        )
    parts = []
    for group, row in repeats.items():
        words = [f"{n} {format_value(statistics.median(v), unit)}" for n, v in row.items()]
        parts.append(f"{group}: {', '.join(words)}")
    title = title or quantity[:1].upper() + quantity[1:]
    return CaptionedFigure(
        _draw(repeats, quantity, unit, title),
        alt=f"Bars of {quantity}. {'; '.join(parts)}.",
        caption=_caption(repeats),
    )


def _draw(repeats: Repeats, quantity: str, unit: str, title: str) -> Figure:
    medians = [statistics.median(values) for row in repeats.values() for values in row.values()]
    largest = max(map(abs, medians))
    scale, shown_unit = {"s": second_unit, "bytes": byte_unit}.get(unit, lambda _: (1.0, unit))(
        largest
    )
    figure, axes = new_axes(4.2, title)
    styles = _styles(list(dict.fromkeys(name for row in repeats.values() for name in row)))
    width = min(0.8 / len(styles), 0.28)
    for number, (name, style) in enumerate(styles.items()):
        shift = (number - (len(styles) - 1) / 2) * width
        for place, row in enumerate(repeats.values()):
            if name not in row:
                continue
            values = [value / scale for value in row[name]]
            x, middle = place + shift, statistics.median(values)
            axes.bar(x, middle, 0.92 * width, label=name, **style.fill)
            if len(values) > 1:
                spread = [[middle - min(values)], [max(values) - middle]]
                axes.errorbar(x, middle, spread, color=DARK, capsize=4, linewidth=1.2)
            if len(medians) <= 12:
                above = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
                axes.annotate(format_number(middle), (x, max(*values, 0)), (0, 3), **above)
    axes.set_xticks(range(len(repeats)), [textwrap.fill(group, 16) for group in repeats])
    axes.set(xlim=(-0.6, len(repeats) - 0.4), ylabel=f"{quantity} ({shown_unit})")
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    axes.margins(y=0.12)
    add_legend(figure, [swatch(name, style) for name, style in styles.items()])
    return figure


def _model_of(name: str) -> str | None:
    """The series that a model predicts; None where ``name`` is not a model."""
    if name == "model":
        return "measured"
    return name.removesuffix(" model") if name.endswith(" model") else None


def _styles(names: list[str]) -> dict[str, Style]:
    """The style of each series; a model has the colour of the series that it predicts."""
    bases = {name: _model_of(name) or name for name in names}
    style_of = dict(zip(dict.fromkeys(bases.values()), itertools.cycle(s for s, *_ in SERIES)))
    looks = {name: style_of[base] for name, base in bases.items()}
    return {name: look.model if _model_of(name) else look for name, look in looks.items()}


def _caption(repeats: Repeats) -> str:
    ratios = [
        statistics.median(row[base]) / model
        for row in repeats.values()
        for name in row
        if (base := _model_of(name)) in row and (model := statistics.median(row[name]))
    ]
    measured = [each for row in repeats.values() for each in row.values() if len(each) > 1]
    words = joined(ratio_words(ratios, "hatched"), repeats_words(measured, "Bars"))
    return words or "Each bar is one value, not a median of repeats."
