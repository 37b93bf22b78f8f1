"""Figures of what changes from epoch to epoch, and with the size of the data: where time goes."""

import math
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.units import format_count, format_number, format_seconds, second_unit
from workbook.measure.compare.summary import Record, filled, present, runs_of
from workbook.measure.spread import Spread
from workbook.plots.figure import WIDTH_IN, CaptionedFigure, add_legend, add_title, drawn, new_axes
from workbook.plots.palette import SERIES, Style, styles_of, swatch

# By bar: for each epoch its seconds by kind.
Epochs = list[dict[str, float]]
_COLUMNS = 3


def epoch_breakdowns(record: Record, names: Sequence[str] = ()) -> dict[str, Epochs]:
    """Of each contender and role in the main setting, the phases of every epoch.

    Medians over the repeats of the mean over the ranks. What no span covers is ``other``; spans of
    threads that work at the same time are scaled to fit the epoch.

    Args:
        record: of a comparison.
        names: some of the contenders that ran; by default all.
    """
    found = {}
    for name in names or present(record):
        runs = [run for run in runs_of(record, name) if run.get("epoch_phases_s")]
        roles = runs[0]["epoch_phases_s"] if runs else {}
        for role in roles:
            label = name if len(roles) == 1 else f"{name}: {role}"
            found[label] = _medians(runs, role)
    return found


def _medians(runs: Sequence[dict], role: str) -> Epochs:
    epochs = []
    for number in range(min(len(run["epochs"]) for run in runs)):
        rows = [run["epoch_phases_s"].get(role, []) for run in runs]
        rows = [row[number] for row in rows if number < len(row)]
        whole = statistics.median(run["epochs"][number]["seconds"] for run in runs)
        kinds = sorted({kind for row in rows for kind in row})
        seconds = {kind: statistics.median(row.get(kind, 0.0) for row in rows) for kind in kinds}
        epochs.append(filled(seconds, whole))
    return epochs


@drawn
def breakdown(record: Record, names: Sequence[str] = ()) -> CaptionedFigure:
    """Every epoch as a stacked bar, a panel per contender and role; by default of all contenders.

    Raises:
        ValueError: the record has no phases by epoch of these contenders.
    """
    found = epoch_breakdowns(record, names)
    if not found:
        raise ValueError("this record has no phases by epoch: record it anew")
    styles = styles_of(kind for rows in found.values() for row in rows for kind in row)
    longest = max(sum(row.values()) for rows in found.values() for row in rows)
    scale, unit = second_unit(longest / 2)
    rows, columns = math.ceil(len(found) / _COLUMNS), min(_COLUMNS, len(found))
    figure = Figure(figsize=(WIDTH_IN, 1.4 + 1.9 * rows))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, epochs) in zip(grid.flat, found.items()):
        _draw_epochs(axes, epochs, styles, scale)
        axes.set_title(name, fontsize=9)
    for axes in list(grid.flat)[len(found) :]:
        axes.set_visible(False)
    for place, axes in enumerate(grid.flat):
        lowest = place + grid.shape[1] >= len(found)
        axes.set_xlabel("epoch" if lowest else "")
        axes.tick_params(labelbottom=lowest)
    figure.supylabel(f"time ({unit})", fontsize=11)
    main = record["settings"][0]
    ranks = format_count(main["world_size"], "rank")
    title = f"Where each epoch goes: {ranks}, batches of {main['batch_size']}"
    add_title(figure, title)
    add_legend(figure, [swatch(kind, style) for kind, style in styles.items()])
    told = "; ".join(f"{name} {_shares(epochs[-1])}" for name, epochs in found.items())
    return CaptionedFigure(
        figure,
        alt=f"{title}: stacked bars, a panel per contender. In the last epoch: {told}.",
        caption=f"{_warm_up(found)} Means over the ranks of a panel, medians of the repeats; "
        "evaluation is outside the epochs.",
    )


def _draw_epochs(axes: Axes, epochs: Epochs, styles: dict[str, Style], scale: float) -> None:
    for number, row in enumerate(epochs, start=1):
        below = 0.0
        for kind, style in styles.items():
            height = row.get(kind, 0.0) / scale
            axes.bar(number, height, 0.8, below, **style.fill)
            below += height
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y")


def _shares(row: dict[str, float]) -> str:
    whole = sum(row.values())
    kinds = sorted(row, key=row.__getitem__, reverse=True)[:3]
    return ", ".join(f"{kind} {row[kind] / whole:.0%}" for kind in kinds)


def _warm_up(found: Mapping[str, Epochs]) -> str:
    """How much longer the first epoch is than the median of the others, as a sentence."""
    factors = {}
    for name, epochs in found.items():
        first, *others = (sum(row.values()) for row in epochs)
        if others:
            factors[name] = first / statistics.median(others)
    if not factors:
        return "One epoch each, with its warm-up."
    most = max(factors, key=factors.__getitem__)
    least = min(factors, key=factors.__getitem__)
    return (
        f"First epoch / median of the others: {format_number(factors[least])} ({least}) to "
        f"{format_number(factors[most])} ({most})."
    )


@drawn
def loading(record: Record) -> CaptionedFigure:
    """Seconds to load the data set once, and to read all its batches in an epoch, by its size."""
    once = {row["train_size"]: row["seconds"] for row in record["loading"]}
    lines = {"load the data set, once per rank": once, "read an epoch's batches": _read(record)}
    title = "Loading by training samples"
    figure, axes = new_axes(3.4, title)
    for (name, points), (style, marker, line) in zip(lines.items(), SERIES):
        spreads = [Spread.of(repeats) for repeats in points.values()]
        middle = [1e3 * spread.median for spread in spreads]
        whiskers = [
            [1e3 * (s.median - s.low) for s in spreads],
            [1e3 * (s.high - s.median) for s in spreads],
        ]
        look = {"color": style.color, "marker": marker, "linestyle": line, "label": name}
        axes.errorbar(list(points), middle, whiskers, capsize=3, linewidth=1.4, **look)
    axes.set(xscale="log", yscale="log", xlabel="training samples", ylabel="time (ms)")
    axes.set_xticks(list(once), [f"{size:,}" for size in once])
    axes.minorticks_off()
    axes.grid()
    axes.legend()
    told = "; ".join(f"{name}: {_ends(points)}" for name, points in lines.items() if points)
    return CaptionedFigure(
        figure,
        alt=f"{title}. {told}.",
        caption=f"{told}. Medians, whiskers are quartiles; batches of one device.",
    )


def _read(record: Record) -> dict[int, list[float]]:
    """By training samples, the seconds of an epoch that one device spends on reading batches."""
    main, found = record["settings"][0], {}
    for run in record["runs"]:
        setting = record["settings"][run["setting"]]
        like = [setting[key] == main[key] for key in ("batch_size", "world_size")]
        if run["contender"] == "single" and all(like) and run.get("epoch_phases_s"):
            (epochs,) = run["epoch_phases_s"].values()
            data = [epoch.get("data", 0.0) for epoch in epochs]
            found.setdefault(setting["train_size"], []).append(statistics.median(data[1:] or data))
    return dict(sorted(found.items()))


def _ends(points: Mapping[int, list[float]]) -> str:
    ends = dict.fromkeys([min(points), max(points)])
    return ", ".join(
        f"{format_seconds(statistics.median(points[size]))} for {size:,} samples" for size in ends
    )
