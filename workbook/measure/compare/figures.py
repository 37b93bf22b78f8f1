"""The figures of a record: pure functions from the recorded dict to a captioned figure.

A dozen contenders in one pair of axes cannot be told apart: lines stand in small multiples, a
panel per technique, ours beside PyTorch's, with one device as a reference.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from labkit.units import format_count, format_number, format_seconds, second_unit
from workbook.measure.compare import summary
from workbook.measure.compare.summary import (
    SINGLE,
    VARIED,
    Record,
    present,
    runs_of,
    series,
    varied,
)
from workbook.measure.panels import draw_grid, draw_rows, label_rows
from workbook.measure.spread import Spread
from workbook.plots import bars, learning_curves
from workbook.plots.figure import WIDTH_IN, CaptionedFigure, add_legend, add_title, drawn, joined
from workbook.plots.palette import DARK, SERIES, Style, styles_of, swatch

OURS, THEIRS, THEIRS_ON_OURS, ONE = ("labkit", "PyTorch", "PyTorch on labkit", "one device")
LOOKS: dict[str, tuple[Style, str, Any]] = dict(
    zip((OURS, THEIRS, THEIRS_ON_OURS), SERIES, strict=False)
) | {ONE: (Style(DARK), "", ":")}
_REPEATS = "medians of the repeats, whiskers their quartiles."


def draw(record: Record) -> dict[str, CaptionedFigure]:
    """The figures for which the record has runs, by name."""
    found = {}
    for name, builtin in {"curves": False, "curves_pytorch": True}.items():
        if any(one["builtin"] == builtin for one in present(record).values()):
            found[name] = curves(record, builtin=builtin)
    if found:
        found["time_to_accuracy"] = time_to_accuracy(record)
    if summary.epoch_phases(record):
        found["epochs"] = breakdown(record)
    if record.get("loading") and SINGLE in present(record):
        found["loading"] = loading(record)
    for field in varied(record) if _ours(record) else ():
        found["ranks" if field == "world_size" else field] = epoch_time(record, field)
    return found


def curves(record: Record, *, builtin: bool = False) -> CaptionedFigure:
    """Loss and held-out accuracy, by epoch and by second: our techniques, or PyTorch's."""
    names = [n for n, one in present(record).items() if n == SINGLE or one["builtin"] == builtin]
    repeats = {name: [run["epochs"] for run in runs_of(record, name)] for name in names}
    whose = "PyTorch's own" if builtin else "Ours"
    return learning_curves(repeats, title=f"{whose}: {_where(record)}", training=True)


@drawn
def epoch_time(record: Record, field: str) -> CaptionedFigure:
    """Epoch time by ``world_size``, ``train_size`` or ``batch_size``, a panel per technique."""
    points = {name: series(record, name, field) for name in present(record)}
    ticks = sorted({at for by_value in points.values() for at in by_value})
    drawn_looks = set()

    def line(look: str) -> dict[str, Any]:
        style, marker, stroke = LOOKS[look]
        return {"color": style.color, "marker": marker, "linestyle": stroke, "linewidth": 1.4}

    def panel(axes: Axes, name: str) -> None:
        theirs = present(record)[name]["counterpart"]
        members = {OURS: name, THEIRS: theirs, THEIRS_ON_OURS: f"{theirs} (labkit)", ONE: SINGLE}
        for look, who in members.items():
            if not (by_value := points.get(who)):
                continue
            drawn_looks.add(look)
            spreads = [Spread.of(repeats) for repeats in by_value.values()]
            if look == ONE and len(spreads) == 1:
                # One device does not vary with the ranks: a line across the panel.
                axes.axhline(spreads[0].median, **line(look))
                continue
            whiskers = list(zip(*(spread.whiskers for spread in spreads)))
            middle = [spread.median for spread in spreads]
            axes.errorbar(list(by_value), middle, whiskers, markersize=5, capsize=3, **line(look))
        if field != "world_size":
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.margins(x=0.08)

    title = f"Epoch time by {VARIED[field]}"
    figure = draw_grid(_ours(record), panel, VARIED[field], "epoch time (s)", title)
    # Once all are drawn: the panels share the axis.
    figure.axes[0].set_ylim(bottom=0)
    present_looks = [look for look in LOOKS if look in drawn_looks]
    add_legend(figure, [Line2D([], [], label=look, **line(look)) for look in present_looks])
    told = _ends(points)
    return CaptionedFigure(figure, alt=f"{title}. {told}", caption=f"{told} Points are {_REPEATS}")


@drawn
def time_to_accuracy(record: Record) -> CaptionedFigure:
    """Epochs and seconds of training to the target accuracy on held-out samples."""
    target, budget = record["config"]["target"], record["settings"][0]["epochs"]
    contenders = present(record)
    found = {name: summary.reached(record, name) for name in contenders}
    looks = [_look(one) for one in contenders.values()]
    figure = Figure(figsize=(WIDTH_IN, 1.5 + 0.34 * len(looks)))
    grid = figure.subplots(1, 2, sharey=True)
    for at, (axes, what) in enumerate(zip(grid, ("epochs", "training time (s)"))):
        never = f"not reached in {budget} epochs"
        rows = [[pair[at] for pair in pairs] if pairs else never for pairs in found.values()]
        draw_rows(axes, what, [LOOKS[look][0] for look in looks], rows)
    label_rows(grid[0], list(found))
    add_title(figure, f"To {target:.0%} held-out accuracy: {_where(record)}")
    add_legend(figure, [swatch(look, LOOKS[look][0]) for look in LOOKS if look in looks])
    seconds = {n: statistics.median(s for _, s in pairs) for n, pairs in found.items() if pairs}
    told = []
    for which, end in {"First": min, "Last": max}.items() if seconds else ():
        name = end(seconds, key=seconds.__getitem__)
        told.append(f"{which} at {target:.0%}: {name}, after {format_seconds(seconds[name])}.")
    if never := [name for name, pairs in found.items() if pairs is None]:
        told.append(f"Not reached in every repeat within {budget} epochs: {', '.join(never)}.")
    return CaptionedFigure(
        figure,
        alt=f"Bars of epochs and seconds to {target:.0%} held-out accuracy. {joined(*told)}",
        caption=f"{joined(*told)} Every epoch counts here, the first too. Bars are {_REPEATS}",
    )


@drawn
def breakdown(record: Record, names: Sequence[str] = ()) -> CaptionedFigure:
    """Every epoch as a stacked bar, a panel per contender and role; by default of all contenders.

    Raises:
        ValueError: the record has no phases by epoch of these contenders.
    """
    found = summary.epoch_phases(record, tuple(names))
    if not found:
        raise ValueError("this record has no phases by epoch: record it anew")
    styles = styles_of(kind for rows in found.values() for row in rows for kind in row)
    longest = max(sum(row.values()) for rows in found.values() for row in rows)
    scale, unit = second_unit(longest / 2)

    def stack(axes: Axes, name: str) -> None:
        for number, row in enumerate(found[name], start=1):
            below = 0.0
            for kind, style in styles.items():
                axes.bar(number, row.get(kind, 0.0) / scale, 0.8, below, **style.fill)
                below += row.get(kind, 0.0) / scale
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))

    title = f"Where each epoch goes: {_where(record)}"
    figure = draw_grid(found, stack, "epoch", f"time ({unit})", title)
    add_legend(figure, [swatch(kind, style) for kind, style in styles.items()])
    shares, factors = [], []
    for name, epochs in found.items():
        whole = sum(epochs[-1].values())
        kinds = sorted(epochs[-1], key=epochs[-1].__getitem__, reverse=True)[:3]
        shares.append(f"{name} {', '.join(f'{k} {epochs[-1][k] / whole:.0%}' for k in kinds)}")
        first, *others = (sum(row.values()) for row in epochs)
        factors += [first / statistics.median(others)] if others else []
    least, most = (format_number(end(factors, default=1.0)) for end in (min, max))
    return CaptionedFigure(
        figure,
        alt=f"{title}: a panel per contender. In the last epoch: {'; '.join(shares)}.",
        caption=f"First epoch / median of the others: {least} to {most}. Means over the ranks of "
        "a panel, medians of the repeats; evaluation is outside the epochs. Messages of PyTorch's "
        "own, where they have no span, are part of compute.",
    )


def loading(record: Record) -> CaptionedFigure:
    """Seconds to load the data set once, and to read all its batches in an epoch, by its size."""
    groups: dict[int, dict[str, list[float]]] = {
        row["train_size"]: {"load, once per rank": row["seconds"]} for row in record["loading"]
    }
    for index, setting in enumerate(record["settings"]):
        if setting["batch_size"] != record["settings"][0]["batch_size"]:
            continue
        for run in runs_of(record, SINGLE, index):
            for epochs in run.get("epoch_phases_s", {}).values():
                data_s = [epoch.get("data", 0.0) for epoch in epochs]
                read = groups[setting["train_size"]].setdefault("read an epoch's batches", [])
                read.append(statistics.median(data_s[1:] or data_s))
    named = {f"{size:,} samples": groups[size] for size in sorted(groups)}
    return bars(named, quantity="time", unit="s", title="Loading, and one device's batches")


def _ours(record: Record) -> list[str]:
    return [n for n, one in present(record).items() if not one["builtin"] and n != SINGLE]


def _look(contender: dict) -> str:
    if contender["name"] == SINGLE:
        return ONE
    if not contender["builtin"]:
        return OURS
    return THEIRS_ON_OURS if contender["backend"] == "labkit" else THEIRS


def _where(record: Record) -> str:
    main = record["settings"][0]
    ranks = format_count(main["world_size"], "rank")
    return f"{ranks}, batches of {main['batch_size']}"


def _ends(points: dict[str, dict[int, list[float]]]) -> str:
    """Each series in words: its values at the smallest and at the largest x."""
    parts = []
    for name, by_x in points.items():
        ends = dict.fromkeys([min(by_x), max(by_x)]) if by_x else ()
        values = (f"{format_seconds(statistics.median(by_x[x]))} at {x:,}" for x in ends)
        parts.append(f"{name} {', '.join(values)}")
    return f"{'; '.join(parts)}."
