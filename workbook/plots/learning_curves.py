"""Learning curves: loss and held-out accuracy, by epoch and by second."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.units import format_count, format_seconds
from workbook.plots.figure import WIDTH_IN, CaptionedFigure, add_legend, add_title, drawn
from workbook.plots.palette import SERIES, Style

Curve = dict[str, np.ndarray]


@drawn
def learning_curves(
    runs: Mapping[str, Any], *, title: str | None = None, training: bool = False
) -> CaptionedFigure:
    """Draw loss and held-out accuracy, by epoch and by second of training.

    Args:
        runs: ``{label: run}``. A run is a result that has ``.epochs``, or the list of epochs
            itself: dicts with ``loss``, ``test_accuracy`` (0 to 1) and ``seconds`` (of this epoch
            alone). A list of such runs is drawn as their medians, with a band that spans all.
        title: above the figure.
        training: draw the accuracy on the training samples, too, if all runs have it
            (``train_accuracy``).

    Raises:
        ValueError: no runs, a run without epochs, or an epoch that lacks a value.
    """
    curves = {str(label): _curve(str(label), run) for label, run in runs.items()}
    if not curves:
        raise ValueError('no runs to draw: give at least one, {"label": result.epochs}')
    rows = ["loss", "accuracy"]
    if training and all("train accuracy" in curve for curve in curves.values()):
        rows.insert(1, "train accuracy")
    figure = Figure(figsize=(WIDTH_IN, 1.4 + 2.1 * len(rows)))
    grid = figure.subplots(len(rows), 2, sharex="col", sharey="row")
    lines = [
        _draw_curve(dict(zip(rows, grid)), label, curve, *look)
        for (label, curve), look in zip(curves.items(), itertools.cycle(SERIES))
    ]
    names = {"loss": "training loss", "train accuracy": "training accuracy (%)"}
    for row, (left, _) in zip(rows, grid):
        left.set_ylabel(names.get(row, "held-out accuracy (%)"))
    most = max(len(curve["epoch"]) for curve in curves.values())
    by_epoch, by_second = grid[-1]
    by_epoch.set(xlabel="epoch", xlim=(0.5, most + 0.5))
    by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    by_second.set_xlabel("time in training (s)")
    by_second.set_xlim(left=0)
    for axes in grid.flat:
        axes.grid()
    add_title(figure, title or "Loss and held-out accuracy")
    add_legend(figure, lines)
    ends = "; ".join(_end_of(label, curve) for label, curve in curves.items())
    alt = f"Learning curves of {format_count(len(curves), 'run')}. {ends}."
    return CaptionedFigure(figure, alt=alt, caption=_caption(curves))


def _curve(label: str, run: Any) -> Curve:
    """``epoch`` and ``second`` [E]; all else [repeats, E], of the epochs that all repeats have."""
    run = getattr(run, "epochs", run)
    is_one = not run or isinstance(run[0], Mapping)
    repeats = [list(getattr(one, "epochs", one)) for one in ([run] if is_one else run)]
    fewest = min(map(len, repeats))
    if not fewest:
        raise ValueError(f"{label} has no epochs: train for at least one")
    epochs = [epoch for one in repeats for epoch in one[:fewest]]
    names = ("loss", "test_accuracy", "seconds")
    if missing := [name for name in names if any(name not in epoch for epoch in epochs)]:
        raise ValueError(f"{label} has epochs without {', '.join(missing)}")

    def values(name: str) -> np.ndarray:
        found = [math.nan if epoch[name] is None else epoch[name] for epoch in epochs]
        return np.array(found, dtype=float).reshape(len(repeats), fewest)

    curve = {
        "epoch": np.arange(1, fewest + 1),
        "second": np.median(np.cumsum(values("seconds"), axis=1), axis=0),
        "loss": values("loss"),
        "accuracy": 100 * values("test_accuracy"),
    }
    if all("train_accuracy" in epoch for epoch in epochs):
        curve["train accuracy"] = 100 * values("train_accuracy")
    return curve


def _draw_curve(
    grid: dict[str, Any], label: str, curve: Curve, style: Style, marker: str, line: str
) -> Any:
    """Draw the medians, and what all repeats span; return the line of the legend."""
    look = {"color": style.color, "marker": marker, "linestyle": line, "linewidth": 1.6}
    every = math.ceil(len(curve["epoch"]) / 12)
    for y, row in grid.items():
        for axes, x in zip(row, ("epoch", "second")):
            middle = np.median(curve[y], axis=0)
            axes.plot(curve[x], middle, label=label, markevery=every, markersize=5, **look)
            if len(curve[y]) > 1:
                band = {"color": style.color, "alpha": 0.15, "linewidth": 0}
                axes.fill_between(curve[x], curve[y].min(axis=0), curve[y].max(axis=0), **band)
    return grid["loss"][0].lines[-1]


def _end(curve: Curve, name: str) -> float:
    return float(np.median(curve[name][:, -1]))


def _end_of(label: str, curve: Curve) -> str:
    epochs, seconds = format_count(len(curve["epoch"]), "epoch"), curve["second"][-1]
    return (
        f"{label} ends at loss {_end(curve, 'loss'):.3g} and held-out accuracy "
        f"{_end(curve, 'accuracy'):.1f}% after {epochs} and {format_seconds(seconds)}"
    )


def _caption(curves: dict[str, Curve]) -> str:
    text = "".join(f"{_end_of(label, curve)}." for label, curve in curves.items())
    if len(curves) > 1:
        fast = min(curves, key=lambda label: curves[label]["second"][-1])
        ends = {label: f"{_end(curve, 'accuracy'):.1f}%" for label, curve in curves.items()}
        best = max(curves, key=lambda label: np.nan_to_num(_end(curves[label], "accuracy")))
        equal = [label for label in curves if ends[label] == ends[best]]
        whose = "all" if len(equal) == len(curves) else " and ".join(equal)
        text = (
            f"Best held-out accuracy at the end: {whose}, {ends[best]}. "
            f"First to end: {fast}, after {format_seconds(curves[fast]['second'][-1])}."
        )
    if any(len(curve["loss"]) > 1 for curve in curves.values()):
        text += " Lines are medians of the repeats, bands span all of them."
    return text
