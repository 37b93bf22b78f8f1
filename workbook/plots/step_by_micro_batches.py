"""The time and memory of a step over the number of micro-batches, by schedule."""

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from labkit import units
from workbook.plots.figure import WIDTH_IN, CaptionedFigure, add_legend, add_title, drawn
from workbook.plots.palette import SERIES
from workbook.plots.repeats import counts_words, quartiles

# {name: the rows of a curve, in ascending order of micro-batches}
Curves = dict[str, list[Mapping[str, Any]]]


@drawn
def step_by_micro_batches(
    rows: Iterable[Mapping[str, Any]], *, title: str | None = None
) -> CaptionedFigure:
    """Draw the time and the memory of a step over the number of micro-batches.

    Args:
        rows: dicts with ``schedule`` (the curve's name), ``micro_batches`` and ``step_s`` (a
            number, or its repeats: the point is their median, the band spans the middle half),
            and optionally ``model_s`` (the predicted step) and ``memory_bytes`` (of each stage;
            the largest is drawn).
        title: above the figure.

    Raises:
        ValueError: no rows.
    """
    curves: Curves = {}
    for row in sorted(rows, key=lambda row: row["micro_batches"]):
        curves.setdefault(str(row["schedule"]), []).append(row)
    if not curves:
        raise ValueError(
            "no rows to draw: measure a split with at least one number of micro-batches"
        )
    return CaptionedFigure(
        _draw_curves(curves, title or "Step and memory by number of micro-batches"),
        alt=_curves_alt(curves),
        caption=_curves_caption(curves),
    )


def _draw_curves(curves: Curves, title: str) -> Figure:
    has_memory = any("memory_bytes" in row for rows in curves.values() for row in rows)
    figure = Figure(figsize=(WIDTH_IN, 3.8))
    grid = figure.subplots(1, 1 + has_memory, squeeze=False)[0]
    entries = _draw_steps(grid[0], curves)
    if has_memory:
        _draw_memory(grid[1], curves)
    counts = sorted({row["micro_batches"] for rows in curves.values() for row in rows})
    for axes in grid:
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("micro-batches")
        axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
        axes.grid()
    add_title(figure, title)
    add_legend(figure, entries)
    return figure


def _draw_steps(axes: Axes, curves: Curves) -> list[Line2D]:
    longest = max(_median_s(row) for rows in curves.values() for row in rows)
    scale, unit = units.second_unit(longest)
    entries = []
    for (name, rows), (style, marker, _) in zip(curves.items(), itertools.cycle(SERIES)):
        counts = [row["micro_batches"] for row in rows]
        middle = [_median_s(row) / scale for row in rows]
        entries += axes.plot(counts, middle, color=style.color, marker=marker, label=name)
        low, high = zip(*(quartiles(units.as_repeats(row["step_s"])) for row in rows))
        band = {"color": style.color, "alpha": 0.2, "linewidth": 0}
        axes.fill_between(counts, [s / scale for s in low], [s / scale for s in high], **band)
        model = [(row["micro_batches"], row["model_s"]) for row in rows if "model_s" in row]
        if model:
            look = {"color": style.model.ink, "linestyle": (0, (5, 3)), "zorder": 3}
            xs, ys = zip(*model)
            entries += axes.plot(xs, [s / scale for s in ys], label=f"{name} model", **look)
    axes.set(title="Step", ylabel=f"time of a step ({unit})")
    return entries


def _draw_memory(axes: Axes, curves: Curves) -> None:
    largest = {
        name: {row["micro_batches"]: _memory(row) for row in rows if "memory_bytes" in row}
        for name, rows in curves.items()
    }
    most = max(max(sizes.values(), default=0) for sizes in largest.values())
    scale, unit = units.byte_unit(most)
    for (_, sizes), (style, marker, _) in zip(largest.items(), itertools.cycle(SERIES)):
        held = [size / scale for size in sizes.values()]
        axes.plot(list(sizes), held, color=style.color, marker=marker)
    axes.set(title="Memory of the largest stage", ylabel=f"memory ({unit})")


def _median_s(row: Mapping[str, Any]) -> float:
    return statistics.median(units.as_repeats(row["step_s"]))


def _memory(row: Mapping[str, Any]) -> float:
    return max(units.as_repeats(row["memory_bytes"]))


def _curves_alt(curves: Curves) -> str:
    parts = []
    for name, rows in curves.items():
        ends = [(units.format_seconds(_median_s(row)), row) for row in (rows[0], rows[-1])]
        words = (f"{seconds} with {row['micro_batches']}" for seconds, row in ends)
        parts.append(f"{name}: {', '.join(words)}")
    return f"Curves of a step's time over the number of micro-batches. {'; '.join(parts)}."


def _curves_caption(curves: Curves) -> str:
    sentences = []
    for name, rows in curves.items():
        best = min(rows, key=_median_s)
        text = f"{name} is fastest with {units.format_count(best['micro_batches'], 'micro-batch')}"
        sentences.append(f"{text}, {units.format_seconds(_median_s(best))}")
        if "memory_bytes" in best:
            sentences[-1] += f" and {units.format_bytes(_memory(best))} on its largest stage"
    text = f"{'; '.join(sentences)}."
    steps = [units.as_repeats(row["step_s"]) for rows in curves.values() for row in rows]
    if times := counts_words(steps):
        text += f" Points are medians of {times} steps; bands span the middle half."
    return text
