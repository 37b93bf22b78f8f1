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
            low = curve[name].min(axis=0)
            high = curve[name].max(axis=0)
            for axes, x in zip(row, map(curve.get, by)):
                axes.plot(x, np.median(curve[name], axis=0), label=label, **look)
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

    repeats = [list(curve["loss"]) for curve in curves.values()]
    spread = repeats_words(repeats, "Lines are medians of {} repeats, bands span all of them.")
    words, takeaway = _ends(curves)
    alt = f"Learning curves of {format_count(len(curves), 'run')}. {words}"
    return CaptionedFigure(figure, alt=alt, caption=joined(takeaway, spread))


def _ends(curves: Mapping[str, dict[str, np.ndarray]]) -> tuple[str, str]:
    """The end of each curve in words, and a sentence on the best and the fastest of them."""
    accuracies = {}
    seconds = {}
    parts = []
    for label, curve in curves.items():
        loss = np.median(curve["loss"][:, -1])
        epochs = format_count(int(curve["epoch"][-1]), "epoch")
        accuracies[label] = float(np.median(curve["test_accuracy"][:, -1]))
        seconds[label] = float(curve["second"][-1])
        parts.append(
            f"{label} ends at loss {loss:.3g} and held-out accuracy {accuracies[label]:.1f}% "
            f"after {epochs} and {format_seconds(seconds[label])}"
        )
    words = f"{'; '.join(parts)}."
    if len(curves) == 1:
        return words, words
    fastest = min(seconds, key=seconds.__getitem__)
    best_label = max(accuracies, key=lambda label: np.nan_to_num(accuracies[label]))
    best = f"{accuracies[best_label]:.1f}%"
    equal = [label for label, accuracy in accuracies.items() if f"{accuracy:.1f}%" == best]
    return words, (
        f"Best held-out accuracy at the end: {' and '.join(equal)}, {best}. "
        f"First to finish: {fastest}, after {format_seconds(seconds[fastest])}."
    )


def _curve(run: Any) -> dict[str, np.ndarray]:
    """``epoch`` and ``second`` [E]; the rest [repeats, E], of the epochs that all repeats have."""
    sent_mb = max(getattr(run, "bytes_sent", None) or [math.nan]) / 1e6
    run = getattr(run, "epochs", run)
    if isinstance(run[0], Mapping):
        run = [run]
    repeats = [getattr(repeat, "epochs", repeat) for repeat in run]
    fewest = min(map(len, repeats))

    def values(name: str) -> np.ndarray:
        """The values of all repeats [repeats, E]; NaN where there is no held-out accuracy."""
        rows = [[epoch.get(name, math.nan) for epoch in epochs[:fewest]] for epochs in repeats]
        return np.array(rows, float)

    epoch = np.arange(1, fewest + 1)
    return {
        "loss": values("loss"),
        "test_accuracy": 100 * values("test_accuracy"),
        "epoch": epoch,
        "second": np.median(np.cumsum(values("seconds"), axis=1), axis=0),
        "megabyte": sent_mb * epoch / fewest,
    }
