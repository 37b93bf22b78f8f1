"""Learning curves: loss and held-out accuracy, by epoch, second or what was sent."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.units import format_count, format_seconds
from workbook.plots.figure import (
    WIDTH_IN,
    CaptionedFigure,
    add_legend,
    add_title,
    drawn,
    joined,
    repeats_words,
)
from workbook.plots.palette import SERIES

_LABELS = {
    "loss": "training loss",
    "test_accuracy": "held-out accuracy (%)",
}
_BY = {"epoch": "epoch", "second": "time in training (s)", "megabyte": "sent by a rank (MB)"}


@drawn
def learning_curves(
    runs: Mapping[str, Any],
    *,
    title: str = "Loss and held-out accuracy",
    by: tuple[str, str] = ("epoch", "second"),
) -> CaptionedFigure:
    """Draw loss and held-out accuracy, by epoch and by second of training.

    Args:
        runs: ``{label: run}``. A run is a result that has ``.epochs``, or the epochs themselves:
            dicts with ``loss``, ``test_accuracy`` (0 to 1) and ``seconds`` (of this epoch alone).
            A list of such runs is drawn as their medians, with a band that spans all.
        by: the two axes, also ``megabyte``: what the rank that sends most has sent (results only).
    """
    curves = {label: _curve(run) for label, run in runs.items()}
    figure = Figure(figsize=(WIDTH_IN, 5.6))
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    for (label, curve), (style, marker, line) in zip(curves.items(), itertools.cycle(SERIES)):
        look = {"color": style.color, "marker": marker, "linestyle": line, "markersize": 5}
        look["markevery"] = math.ceil(len(curve["epoch"]) / 12)
        for name, row in zip(_LABELS, grid):
            for axes, x in zip(row, map(curve.get, by)):
                axes.plot(x, np.median(curve[name], axis=0), label=label, **look)
                low, high = curve[name].min(axis=0), curve[name].max(axis=0)
                axes.fill_between(x, low, high, color=style.color, alpha=0.15, linewidth=0)
                axes.grid(True)
            row[0].set_ylabel(_LABELS[name])
    for axes, name in zip(grid[-1], by):
        axes.set_xlabel(_BY[name])
        if name == "epoch":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        else:
            axes.set_xlim(left=0)
    add_title(figure, title)
    add_legend(figure, grid[0, 0].lines)

    ends = {
        label: {name: float(np.median(curve[name][..., -1])) for name in curve}
        for label, curve in curves.items()
    }
    told = "; ".join(
        f"{label} ends at loss {end['loss']:.3g} and held-out accuracy "
        f"{end['test_accuracy']:.1f}% after {format_count(int(end['epoch']), 'epoch')} and "
        f"{format_seconds(end['second'])}"
        for label, end in ends.items()
    )
    takeaway = f"{told}."
    if len(ends) > 1:
        fast = min(ends, key=lambda label: ends[label]["second"])
        accuracy = {label: f"{end['test_accuracy']:.1f}%" for label, end in ends.items()}
        best = max(ends, key=lambda label: np.nan_to_num(ends[label]["test_accuracy"]))
        equal = " and ".join(label for label in ends if accuracy[label] == accuracy[best])
        takeaway = (
            f"Best held-out accuracy at the end: {equal}, {accuracy[best]}. "
            f"First to finish: {fast}, after {format_seconds(ends[fast]['second'])}."
        )
    repeats = [list(curve["loss"]) for curve in curves.values()]
    spread = repeats_words(repeats, "Lines are medians of {} repeats, bands span all of them.")
    alt = f"Learning curves of {format_count(len(curves), 'run')}. {told}."
    return CaptionedFigure(figure, alt=alt, caption=joined(takeaway, spread))


def _curve(run: Any) -> dict[str, np.ndarray]:
    """``epoch`` and ``second`` [E]; the rest [repeats, E], of the epochs that all repeats have."""
    sent_mb = max(getattr(run, "bytes_sent", None) or [math.nan]) / 1e6
    run = getattr(run, "epochs", run)
    repeats = [getattr(one, "epochs", one) for one in run]
    if isinstance(run[0], Mapping):
        repeats = [run]
    fewest = min(map(len, repeats))
    values = {
        # NaN where there is no held-out accuracy.
        name: np.array([[e.get(name, math.nan) for e in one[:fewest]] for one in repeats], float)
        for name in ("seconds", *_LABELS)
    }
    curve = {name: values[name] * (1 if name == "loss" else 100) for name in _LABELS}
    seconds = np.median(np.cumsum(values["seconds"], axis=1), axis=0)
    epoch = np.arange(1, fewest + 1)
    return curve | {"epoch": epoch, "second": seconds, "megabyte": sent_mb * epoch / fewest}
