"""Bars of one quantity: measured values beside predictions."""

import itertools
import statistics
import textwrap
from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from labkit.units import as_repeats, byte_unit, format_number, format_value, second_unit
from workbook.plots.figure import CaptionedFigure, add_legend, drawn, new_axes
from workbook.plots.palette import DARK, SERIES, Style, swatch
from workbook.plots.repeats import counts_words, range_words

# {group: {series: repeats}}
Repeats = dict[str, dict[str, list[float]]]


@drawn
def bars(
    groups: Mapping[str, Mapping[str, float | Iterable[float]]],
    *,
    quantity: str,
    unit: str,
    title: str | None = None,
    log: bool = False,
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
        log: a logarithmic axis, for values above 0.

    Raises:
        ValueError: nothing to draw; a value that is not a number; 0 or less on a logarithmic axis.
    """
    repeats = {
        str(group): {name: as_repeats(value) for name, value in row.items()}
        for group, row in groups.items()
    }
    _check_bars(repeats, log)
    return CaptionedFigure(
        _draw_bars(repeats, quantity, unit, title or quantity[:1].upper() + quantity[1:], log),
        alt=_bars_alt(repeats, quantity, unit),
        caption=_bars_caption(repeats),
    )


def _check_bars(repeats: Repeats, log: bool) -> None:
    if not any(repeats.values()):
        raise ValueError(
            'no bars to draw: give groups of series, {"ring": {"measured": [0.9, 1.1]}}'
        )
    low = [
        f"{name} of {group}"
        for group, row in repeats.items()
        for name, values in row.items()
        if min(values) <= 0
    ]
    if log and low:
        raise ValueError(
            f"a logarithmic axis shows values above 0 only, which excludes {', '.join(low)}: "
            "draw with log=False"
        )


def _draw_bars(repeats: Repeats, quantity: str, unit: str, title: str, log: bool) -> Figure:
    names = list(dict.fromkeys(name for row in repeats.values() for name in row))
    medians = [statistics.median(values) for row in repeats.values() for values in row.values()]
    scale, shown_unit = _bar_unit(max(abs(value) for value in medians), unit)
    figure, axes = new_axes(4.2, title)
    styles = _bar_styles(names)
    width = min(0.8 / len(names), 0.28)
    for number, name in enumerate(names):
        shift = (number - (len(names) - 1) / 2) * width
        for place, row in enumerate(repeats.values()):
            if name in row:
                values = [value / scale for value in row[name]]
                _draw_bar(axes, place + shift, values, width, name, styles[name])
                if len(medians) <= 12:
                    _write_median(axes, place + shift, values)
    axes.set_xticks(range(len(repeats)), [textwrap.fill(group, 16) for group in repeats])
    axes.set(xlim=(-0.6, len(repeats) - 0.4), ylabel=f"{quantity} ({shown_unit})")
    _scale_bars(axes, log)
    add_legend(figure, [swatch(name, styles[name]) for name in names])
    return figure


def _bar_unit(largest: float, unit: str) -> tuple[float, str]:
    if unit == "s":
        return second_unit(largest)
    return byte_unit(largest) if unit == "bytes" else (1.0, unit)


def _model_of(name: str) -> str | None:
    """The series that a model predicts; None where ``name`` is not a model."""
    if name == "model":
        return "measured"
    return name.removesuffix(" model") if name.endswith(" model") else None


def _bar_styles(names: list[str]) -> dict[str, Style]:
    """The style of each series; a model has the colour of the series that it predicts."""
    bases = {name: _model_of(name) or name for name in names}
    styles = itertools.cycle(style for style, *_ in SERIES)
    style_of = dict(zip(dict.fromkeys(bases.values()), styles))
    return {
        name: style_of[base].model if _model_of(name) else style_of[base]
        for name, base in bases.items()
    }


def _draw_bar(
    axes: Axes, x: float, values: list[float], width: float, name: str, style: Style
) -> None:
    middle, low, high = statistics.median(values), min(values), max(values)
    axes.bar(x, middle, 0.92 * width, label=name, **style.fill)
    if len(values) > 1:
        spread = [[middle - low], [high - middle]]
        axes.errorbar(x, middle, spread, color=DARK, capsize=4, linewidth=1.2)


def _write_median(axes: Axes, x: float, values: list[float]) -> None:
    text, top = format_number(statistics.median(values)), max(*values, 0)
    axes.annotate(text, (x, top), (0, 3), textcoords="offset points", ha="center", va="bottom")


def _scale_bars(axes: Axes, log: bool) -> None:
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)


def _bars_alt(repeats: Repeats, quantity: str, unit: str) -> str:
    groups = []
    for group, row in repeats.items():
        medians = {name: statistics.median(values) for name, values in row.items()}
        values = (f"{name} {format_value(value, unit)}" for name, value in medians.items())
        groups.append(f"{group}: {', '.join(values)}")
    return f"Bars of {quantity}. {'; '.join(groups)}."


def _bars_caption(repeats: Repeats) -> str:
    sentences = []
    if ratios := _ratios(repeats):
        times = range_words(ratios)
        times = "equal to" if times == "1" else f"{times} times"
        sentences.append(f"What was measured is {times} the model (hatched).")
    medians = [values for row in repeats.values() for values in row.values() if len(values) > 1]
    if times := counts_words(medians):
        sentences.append(f"Bars are medians of {times} repeats; whiskers span all of them.")
    return " ".join(sentences) or "Each bar is one value, not a median of repeats."


def _ratios(repeats: Repeats) -> list[float]:
    """Measured value / prediction, for each pair of them in a group."""
    ratios = []
    for row in repeats.values():
        for name in row:
            base = _model_of(name)
            if base in row and (model := statistics.median(row[name])):
                ratios.append(statistics.median(row[base]) / model)
    return ratios
