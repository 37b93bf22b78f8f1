"""Staleness: the histogram of a run, and a model of a run with a bound."""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from labkit.costs.async_run import simulate
from labkit.units import format_count
from workbook.plots.figure import (
    WIDTH_IN,
    CaptionedFigure,
    add_legend,
    add_title,
    drawn,
    fixed_axes,
    label_lanes,
    new_axes,
)
from workbook.plots.palette import DARK, SERIES, Style, swatch
from workbook.plots.timeline import draw_spans

MAX_WORKERS = 6
# The model's unit of time is one gradient on a worker that is not a straggler.
_WATCHED_S = 20.0


@drawn
def staleness_histogram(
    updates: Sequence[tuple[int, int]],
    *,
    bound: int | None = None,
    title: str | None = None,
) -> CaptionedFigure:
    """Draw the number of updates at each staleness, stacked by worker.

    Args:
        updates: (worker, staleness) of each update, as in ``result.notes["staleness"]``.
        bound: the largest staleness that was allowed, drawn as a line.
        title: above the figure.

    Raises:
        ValueError: no updates.
    """
    late = _late_by_worker(updates)
    if not late:
        raise ValueError('no updates to draw: give result.notes["staleness"] of a training run')
    figure, axes = new_axes(3.4, title or "Staleness of the updates")
    groups = {f"worker {worker}": mine for worker, mine in late.items()}
    add_legend(figure, _draw_histogram(axes, groups, itertools.cycle(SERIES), bound, model=False))
    every = [staleness for mine in late.values() for staleness in mine]
    workers = format_count(len(late), "worker")
    limit = "no bound was set" if bound is None else f"the bound was {bound}"
    return CaptionedFigure(
        figure,
        alt=f"Histogram of the staleness of {len(every):,} updates, stacked by worker. "
        f"{_by_worker(late)}.",
        caption=f"Mean staleness {statistics.fmean(every):.2f} with {workers}, largest "
        f"{max(every)}; {limit}.",
    )


@drawn
def staleness_model(
    workers: int = 3, factor: float = 4, bound: int | None = None
) -> CaptionedFigure:
    """Draw the model of an asynchronous run: its timeline, above the histogram of staleness.

    Args:
        workers: W, 1 to 6; worker 1 is the straggler.
        factor: the straggler takes this many times as long for a gradient, at least 1.
        bound: the largest staleness, W - 1 or more; None allows any.

    Raises:
        ValueError: a value outside these ranges.
    """
    if workers not in range(1, MAX_WORKERS + 1):
        raise ValueError(f"the model draws 1 to {MAX_WORKERS} workers, got {workers!r}")
    free = simulate(workers, factor=factor, duration_s=_WATCHED_S, bound=bound)
    rounds = simulate(workers, factor=factor, duration_s=_WATCHED_S, synchronous=True)
    figure = Figure(figsize=(WIDTH_IN, 5.4))
    above = fixed_axes(figure, 64, 600, 244, 354)
    below = fixed_axes(figure, 64, 600, 92, 196)
    above.set_xlim(0, free.duration_s)
    kinds = draw_spans(above, list(free.trace.spans), list(range(workers + 1)), 1.0, model=True)
    label_lanes(above, ["server", *(f"worker {rank}" for rank in range(1, workers + 1))])
    above.set_xlabel("time (gradients of a worker that does not straggle)")
    late = _late_by_worker(free.updates)
    others = [s for worker in late if worker != 1 for s in late[worker]]
    groups = {"the straggler": late.get(1, []), "other workers": others}
    # These looks differ from those of the spans above.
    entries = _draw_histogram(below, groups, SERIES[3:5], bound, model=True)
    crew = format_count(workers, "worker")
    limit = "no bound" if bound is None else f"bound {bound}"
    add_title(figure, f"{crew}, one {factor:g}x straggler, {limit} (model)")
    add_legend(figure, kinds + entries)
    waits = f"{free.waiting_share():.0%} of their time"
    largest = max(update.staleness for update in free.updates)
    return CaptionedFigure(
        figure,
        alt=f"Predicted timeline of a server and {crew}, worker 1 {factor:g} times as slow, "
        f"{limit}: workers wait {waits}. Below, predicted staleness. {_by_worker(late)}.",
        caption=f"Model: staleness {free.mean_staleness():.1f} on average and at most {largest}, "
        f"{limit}. {len(free.updates)} gradients are applied while synchronous rounds apply "
        f"{len(rounds.updates)}; workers wait {waits} instead of {rounds.waiting_share():.0%}.",
    )


def _draw_histogram(
    axes: Axes,
    groups: dict[str, list[int]],
    looks: Iterable[tuple[Style, str, str]],
    bound: int | None,
    model: bool,
) -> list[Artist]:
    """Staleness by group as stacked bars; returns the legend's entries."""
    largest = max(*(late for group in groups.values() for late in group), bound or 0)
    heights = [0] * (largest + 1)
    entries: list[Artist] = []
    for (name, late), (style, _, _) in zip(groups.items(), looks):
        counts = Counter(late)
        mine = [counts[staleness] for staleness in range(largest + 1)]
        look = (style.model if model else style).fill
        axes.bar(range(largest + 1), mine, 0.8, heights, **look)
        heights = [low + high for low, high in zip(heights, mine)]
        entries.append(swatch(name, style, model))
    if bound is not None:
        axes.axvline(bound + 0.5, color=DARK, linestyle="--")
        entries.append(Line2D([], [], color=DARK, linestyle="--", label=f"bound {bound}"))
    axes.set(xlabel="staleness (updates by others between pull and update)", ylabel="updates")
    axes.set_xlim(-0.6, largest + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    return entries


def _late_by_worker(updates: Iterable[Sequence[int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for worker, late in updates:
        found.setdefault(int(worker), []).append(int(late))
    return dict(sorted(found.items()))


def _by_worker(late: dict[int, list[int]]) -> str:
    return "; ".join(
        f"worker {worker}: {format_count(len(mine), 'update')}, mean staleness "
        f"{statistics.fmean(mine):.1f}, largest {max(mine)}"
        for worker, mine in late.items()
    )
