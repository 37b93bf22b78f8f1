"""Figures that compare runs: learning curves, and bars of one quantity beside its model."""

import itertools
import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from labkit.plots.figure import (
    DARK,
    GRID,
    SERIES,
    WIDTH_IN,
    CaptionedFigure,
    Style,
    add_legend,
    add_title,
    drawn,
    swatch,
)
from labkit.units import (
    as_repeats,
    byte_unit,
    format_number,
    format_seconds,
    format_value,
    second_unit,
)

Curve = dict[str, np.ndarray]
# By group, by series: the repeats.
Repeats = dict[str, dict[str, list[float]]]


@drawn
def learning_curves(runs: Mapping[str, Any], *, title: str | None = None) -> CaptionedFigure:
    """Draw loss and held-out accuracy, by epoch and by second of training.

    Args:
        runs: by label, a result that has ``.epochs``, or the epochs themselves: dicts with
            ``loss``, ``test_accuracy`` (0 to 1) and ``seconds``, which this one epoch took. A list
            of those is repeats: the line goes through their medians, the band spans all of them.
        title: above the figure.

    Raises:
        ValueError: no runs, or one without epochs.
    """
    curves = {str(label): _median_curve(str(label), run) for label, run in runs.items()}
    if not curves:
        raise ValueError('no runs to draw: give at least one, {"label": result.epochs}')
    figure = Figure(figsize=(WIDTH_IN, 5.6))
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    lines = [
        _draw_curve(grid, label, curve, *look)
        for (label, curve), look in zip(curves.items(), itertools.cycle(SERIES))
    ]
    _label_curves(grid, max(len(curve["epoch"]) for curve in curves.values()))
    add_title(figure, title or "Loss and held-out accuracy")
    add_legend(figure, lines)
    ends = "; ".join(_end_of(label, curve) for label, curve in curves.items())
    count = "1 run" if len(curves) == 1 else f"{len(curves)} runs"
    return CaptionedFigure(
        figure, alt=f"Learning curves of {count}. {ends}.", caption=_curves_caption(curves)
    )


def _median_curve(label: str, run: Any) -> Curve:
    """Medians of the repeats; ``low loss`` and so on are the band's edges, if there are any."""
    run = getattr(run, "epochs", run)
    if not run or isinstance(run[0], Mapping):
        return _curve(label, run)
    repeats = [_curve(label, one) for one in run]
    fewest = min(len(one["epoch"]) for one in repeats)
    stacked = {key: np.array([one[key][:fewest] for one in repeats]) for key in repeats[0]}
    curve = {key: np.median(values, axis=0) for key, values in stacked.items()}
    if len(repeats) > 1:
        for key in ("loss", "accuracy"):
            curve |= {f"low {key}": stacked[key].min(axis=0)}
            curve |= {f"high {key}": stacked[key].max(axis=0)}
    return curve


def _curve(label: str, run: Any) -> Curve:
    epochs = list(getattr(run, "epochs", run))
    if not epochs:
        raise ValueError(f"{label} has no epochs: train for at least one")
    names = ("loss", "test_accuracy", "seconds")
    if missing := [name for name in names if any(name not in epoch for epoch in epochs)]:
        raise ValueError(f"{label} has epochs without {', '.join(missing)}")
    loss, accuracy, seconds = (
        np.array([math.nan if epoch[name] is None else epoch[name] for epoch in epochs])
        for name in names
    )
    return {
        "epoch": np.arange(1, len(epochs) + 1),
        "second": np.cumsum(seconds),
        "loss": loss,
        "accuracy": 100 * accuracy,
    }


def _draw_curve(grid, label: str, curve: Curve, style: Style, marker: str, line: str):
    look = {"color": style.color, "marker": marker, "linestyle": line, "linewidth": 1.6}
    every = math.ceil(len(curve["epoch"]) / 12)
    for row, y in zip(grid, ("loss", "accuracy")):
        for axes, x in zip(row, ("epoch", "second")):
            axes.plot(curve[x], curve[y], label=label, markevery=every, markersize=5, **look)
            if f"low {y}" in curve:
                band = {"color": style.color, "alpha": 0.15, "linewidth": 0}
                axes.fill_between(curve[x], curve[f"low {y}"], curve[f"high {y}"], **band)
    return grid[0, 0].lines[-1]


def _label_curves(grid, num_epochs: int) -> None:
    grid[0, 0].set_ylabel("training loss")
    grid[1, 0].set_ylabel("held-out accuracy (%)")
    grid[1, 0].set_xlabel("epoch")
    grid[1, 1].set_xlabel("time in training (s)")
    grid[1, 0].set_xlim(0.5, num_epochs + 0.5)
    grid[1, 0].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    grid[1, 1].set_xlim(left=0)
    for axes in grid.flat:
        axes.grid(color=GRID, linewidth=0.6)


def _end_of(label: str, curve: Curve) -> str:
    epochs = len(curve["epoch"])
    count = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    return (
        f"{label} ends at loss {curve['loss'][-1]:.3g} and held-out accuracy "
        f"{curve['accuracy'][-1]:.1f}% after {count} and {format_seconds(curve['second'][-1])}"
    )


def _curves_caption(curves: dict[str, Curve]) -> str:
    best = max(curves, key=lambda label: np.nan_to_num(curves[label]["accuracy"][-1], nan=-1))
    fast = min(curves, key=lambda label: curves[label]["second"][-1])
    text = f"{_end_of(best, curves[best])}."
    if len(curves) > 1:
        text = (
            f"Best held-out accuracy at the end: {best}, {curves[best]['accuracy'][-1]:.1f}%. "
            f"First to end: {fast}, after {format_seconds(curves[fast]['second'][-1])}."
        )
    text = f"{text} The left column counts epochs, the right one seconds of training."
    if any("low loss" in curve for curve in curves.values()):
        text += " Lines are medians of the repeats, bands span all of them."
    return text


@drawn
def bars(
    groups: Mapping[str, Mapping[str, float | Iterable[float]]],
    *,
    quantity: str,
    unit: str,
    title: str | None = None,
    log: bool = False,
) -> CaptionedFigure:
    """Compare one quantity over groups of bars, measured beside model.

    Args:
        groups: by group, by series, a number or the list of its repeats (the bar is their median,
            the whisker runs from the smallest to the largest). A series called ``model``, or
            ending in `` model``, is a prediction: ``{"ring": {"measured": [...], "model": 0.1}}``,
            or ``{"1 MiB": {"ours": [...], "gloo": [...], "ours model": 0.1}}``.
        quantity: what is compared, the axis' name.
        unit: ``s`` and ``bytes`` are scaled to read well, any other stays as it is.
        title: above the figure.
        log: a logarithmic axis, for values above 0.

    Raises:
        ValueError: nothing to draw; a value that is no number; 0 or less on a logarithmic axis.
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
            f"a logarithmic axis shows values above 0 only, and {', '.join(low)} is not: "
            "draw with log=False"
        )


def _draw_bars(repeats: Repeats, quantity: str, unit: str, title: str, log: bool) -> Figure:
    names = list(dict.fromkeys(name for row in repeats.values() for name in row))
    medians = [statistics.median(values) for row in repeats.values() for values in row.values()]
    scale, shown_unit = _bar_unit(max(abs(value) for value in medians), unit)
    figure = Figure(figsize=(WIDTH_IN, 4.2))
    axes = figure.add_subplot()
    looks = _bar_looks(names)
    width = min(0.8 / len(names), 0.28)
    for number, name in enumerate(names):
        shift = (number - (len(names) - 1) / 2) * width
        for place, row in enumerate(repeats.values()):
            if name in row:
                values = [value / scale for value in row[name]]
                _draw_bar(axes, place + shift, values, width, looks[name], len(medians) <= 12)
    axes.set_xticks(range(len(repeats)), [textwrap.fill(group, 16) for group in repeats])
    axes.set_xlim(-0.6, len(repeats) - 0.4)
    axes.set_ylabel(f"{quantity} ({shown_unit})")
    axes.set_title(title)
    _scale_bars(axes, log)
    add_legend(figure, [looks[name] for name in names])
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


def _bar_looks(names: list[str]) -> dict[str, Patch]:
    """A model has the colour of what it predicts."""
    bases = {name: _model_of(name) or name for name in names}
    styles = itertools.cycle(style for style, *_ in SERIES)
    style_of = dict(zip(dict.fromkeys(bases.values()), styles))
    return {
        name: swatch(name, style_of[base], model=_model_of(name) is not None)
        for name, base in bases.items()
    }


def _draw_bar(
    axes, x: float, values: list[float], width: float, look: Patch, with_number: bool
) -> None:
    middle, low, high = statistics.median(values), min(values), max(values)
    axes.bar(
        x,
        middle,
        0.92 * width,
        facecolor=look.get_facecolor(),
        edgecolor=look.get_edgecolor(),
        hatch=look.get_hatch(),
        linewidth=look.get_linewidth(),
        label=look.get_label(),
    )
    if len(values) > 1:
        spread = [[middle - low], [high - middle]]
        axes.errorbar(x, middle, spread, color=DARK, capsize=4, linewidth=1.2)
    if with_number:
        above = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
        axes.annotate(format_number(middle), (x, max(high, 0)), (0, 3), **above)


def _scale_bars(axes, log: bool) -> None:
    axes.tick_params(axis="x", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
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
        low, high = format_number(min(ratios)), format_number(max(ratios))
        times = f"{low} times" if low == high else f"{low} to {high} times"
        if low == high == "1":
            times = "equal to"
        sentences.append(f"What was measured is {times} the model (hatched).")
    counts = sorted({len(values) for row in repeats.values() for values in row.values()} - {1})
    if counts:
        times = " or ".join(str(count) for count in counts)
        sentences.append(f"Bars are medians of {times} repeats; whiskers span all of them.")
    return " ".join(sentences) or "Each bar is one value, not a median of repeats."


def _ratios(repeats: Repeats) -> list[float]:
    """Measured over model, wherever a group has both."""
    ratios = []
    for row in repeats.values():
        for name in row:
            base = _model_of(name)
            if base in row and (model := statistics.median(row[name])):
                ratios.append(statistics.median(row[base]) / model)
    return ratios
