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
        runs: ``{label: run}``; a run has ``epochs``, dicts with ``loss``, ``test_accuracy`` (0 to
            1) and ``seconds`` (of this epoch alone), and ``bytes_sent`` by rank.
        by: the two axes, also ``megabyte``: what the rank that sends most has sent.
    """
    curves = {label: _curve(run) for label, run in runs.items()}
    figure = Figure(figsize=(WIDTH_IN, 5.6))
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    for (label, curve), (style, marker, line) in zip(curves.items(), itertools.cycle(SERIES)):
        look = {"color": style.color, "marker": marker, "linestyle": line, "markersize": 5}
        look["markevery"] = math.ceil(len(curve["epoch"]) / 12)
        for name, row in zip(_LABELS, grid):
            for axes, quantity in zip(row, by):
                axes.plot(curve[quantity], curve[name], label=label, **look)
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

    words, takeaway = _ends(curves)
    alt = f"Learning curves of {format_count(len(curves), 'run')}. {words}"
    return CaptionedFigure(figure, alt=alt, caption=takeaway)


def _ends(curves: Mapping[str, dict[str, np.ndarray]]) -> tuple[str, str]:
    """The end of each curve in words, and a sentence on the best and the fastest of them."""
    accuracies = {}
    seconds = {}
    parts = []
    for label, curve in curves.items():
        loss = curve["loss"][-1]
        epochs = format_count(int(curve["epoch"][-1]), "epoch")
        accuracy = float(curve["test_accuracy"][-1])
        seconds[label] = float(curve["second"][-1])
        ends = f"loss {loss:.3g}"
        # The data may have no held-out part, or its targets no classes.
        if math.isfinite(accuracy):
            accuracies[label] = accuracy
            ends += f" and held-out accuracy {accuracy:.1f}%"
        parts.append(f"{label} ends at {ends} after {epochs} and {format_seconds(seconds[label])}")
    words = f"{'; '.join(parts)}."
    if len(curves) == 1:
        return words, words
    fastest = min(seconds, key=seconds.__getitem__)
    takeaway = f"First to finish: {fastest}, after {format_seconds(seconds[fastest])}."
    if accuracies:
        best = f"{max(accuracies.values()):.1f}%"
        equal = [label for label, accuracy in accuracies.items() if f"{accuracy:.1f}%" == best]
        takeaway = f"Best held-out accuracy at the end: {' and '.join(equal)}, {best}. {takeaway}"
    return words, takeaway


def _curve(run: Any) -> dict[str, np.ndarray]:
    """The values [E] by name, of E epochs; NaN where there is no held-out accuracy."""
    sent_mb = max(run.bytes_sent or [math.nan]) / 1e6
    numbers = np.arange(1, len(run.epochs) + 1)
    return {
        "loss": np.array([epoch["loss"] for epoch in run.epochs]),
        "test_accuracy": 100 * np.array([epoch["test_accuracy"] for epoch in run.epochs]),
        "epoch": numbers,
        "second": np.cumsum([epoch["seconds"] for epoch in run.epochs]),
        "megabyte": sent_mb * numbers / len(run.epochs),
    }
