"""The figures of a record: pure functions from the recorded dict to a captioned figure."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from labkit.tracing import LOCAL_KINDS
from labkit.units import (
    byte_unit,
    format_bytes,
    format_count,
    format_number,
    format_seconds,
    second_unit,
)
from workbook.measure.compare import summary
from workbook.measure.compare.panels import (
    ONE,
    OURS,
    THEIRS,
    THEIRS_ON_OURS,
    draw_grid,
    draw_panels,
    draw_rows,
)
from workbook.measure.compare.summary import SINGLE, Record, present, runs_of, series
from workbook.measure.spread import Spread
from workbook.plots import learning_curves, phases as draw_phases
from workbook.plots.figure import CaptionedFigure, add_legend, drawn, joined, new_axes
from workbook.plots.palette import SERIES, styles_of, swatch

# {x: repeats}
Points = dict[int, list[float]]
# {what varies: (label of the x axis, title of the figure)}
_BY = {
    "world_size": ("ranks", "Epoch time by ranks"),
    "train_size": ("training samples", "Epoch time by training samples"),
    "batch_size": ("global batch (samples)", "Epoch time by batch"),
}
_REPEATS = "medians of the repeats, whiskers their quartiles."


def draw(record: Record) -> dict[str, CaptionedFigure]:
    """The figures for which the record has runs, by name."""
    if not present(record):
        return {}
    found = {"curves": curves(record), "time_to_accuracy": time_to_accuracy(record)}
    if any(one["builtin"] for one in _ran(record)):
        found["curves_pytorch"] = curves(record, builtin=True)
    if summary.epoch_phases(record):
        found |= {"phases": phases(record), "epochs": breakdown(record)}
    if record.get("loading"):
        found["loading"] = loading(record)
    if any(summary.peak_bytes(record, name) for name in present(record)):
        found["memory"] = memory(record)
    fields = {"world_size": "ranks", "train_size": "train_size", "batch_size": "batch_size"}
    for field, name in fields.items():
        if _ours(record) and summary.varies(record, field):
            found[name] = epoch_time(record, field)
    if "ranks" in found and SINGLE in present(record):
        found["efficiency"] = efficiency(record)
    return found


def curves(record: Record, *, builtin: bool = False) -> CaptionedFigure:
    """Loss and held-out accuracy, by epoch and by second: our techniques, or PyTorch's."""
    names = [one["name"] for one in _ran(record) if one["builtin"] == builtin]
    names = list(dict.fromkeys([SINGLE, *names] if SINGLE in present(record) else names))
    repeats = {name: [run["epochs"] for run in runs_of(record, name)] for name in names}
    whose = "PyTorch's own" if builtin else "Ours"
    return learning_curves(repeats, title=f"{whose}: {_where(record)}", training=True)


def phases(record: Record) -> CaptionedFigure:
    """The time of an epoch by phase, one stacked bar per contender and role of its ranks."""
    found = {}
    for name, epochs in summary.epoch_phases(record).items():
        counted = epochs[1:] or epochs
        kinds = dict.fromkeys(kind for epoch in counted for kind in epoch)
        found[name] = {k: statistics.fmean(e.get(k, 0.0) for e in counted) for k in kinds}
    figure = draw_phases(found, title=f"Where an epoch goes: {_where(record)}")
    # PyTorch's DDP communicates in backward, where no span of ours is.
    unseen = [
        one["name"]
        for one in _ran(record)
        if one["builtin"] and found.get(one["name"], {}).keys() <= LOCAL_KINDS | {"wait", "other"}
    ]
    hidden = f"Communication of {', '.join(unseen)}, if any, is part of compute." if unseen else ""
    means = "Means over the ranks of a bar and the epochs after the first, medians of the repeats."
    caption = joined(figure.caption, means, hidden)
    return CaptionedFigure(figure.figure, alt=figure.alt, caption=caption)


@drawn
def epoch_time(record: Record, field: str) -> CaptionedFigure:
    """Epoch time by ``world_size``, ``train_size`` or ``batch_size``, a panel per technique."""
    x, title = _BY[field]
    points = {name: series(record, name, field) for name in present(record)}
    medians = {name: statistics.median(summary.epoch_times(record, name)) for name in points}
    best = min(medians, key=medians.__getitem__)
    fastest = f"On {_where(record)}, the fastest epoch is that of {best}: "
    fastest += format_seconds(medians[best])
    if SINGLE in medians and best != SINGLE:
        fastest += f" (one device: {format_seconds(medians[SINGLE])})"
    ends = _ends(points, x, format_seconds)
    rule = summary.ranks_rule(record) if field == "world_size" else ""
    doubling = field != "world_size"
    return CaptionedFigure(
        draw_panels(_panels(record, points), x, "epoch time (s)", title, doubling=doubling),
        alt=f"{title}. {ends}",
        caption=joined(f"{fastest}. {ends}", rule, f"Points are {_REPEATS}"),
    )


@drawn
def efficiency(record: Record) -> CaptionedFigure:
    """Efficiency by number of ranks; ``summary.efficiency`` says what it is."""
    found = {name: summary.efficiency(record, name) for name in present(record)}
    percent = {
        name: {ranks: [100 * one for one in repeats] for ranks, repeats in by_ranks.items()}
        for name, by_ranks in found.items()
    }
    panels = _panels(record, percent | {SINGLE: {1: [100.0]}})
    ends = _ends({name: found[name] for name in _ours(record)}, "ranks", "{:.0%}".format)
    return CaptionedFigure(
        draw_panels(panels, "ranks", "efficiency (%)", "Efficiency by ranks"),
        alt=f"Efficiency by ranks. {ends}",
        caption=f"{ends} {summary.efficiency_rule(record)}",
    )


@drawn
def time_to_accuracy(record: Record) -> CaptionedFigure:
    """Epochs and seconds of training to the target accuracy on held-out samples."""
    target, budget = record["config"]["target"], record["settings"][0]["epochs"]
    looks = {one["name"]: _look(one) for one in _ran(record)}
    found = {name: summary.reached(record, name) for name in looks}
    columns = {
        quantity: {n: None if p is None else [one[at] for one in p] for n, p in found.items()}
        for at, quantity in enumerate(("epochs", "training time (s)"))
    }
    seconds = {n: statistics.median(s for _, s in pairs) for n, pairs in found.items() if pairs}
    parts = []
    if seconds:
        first, last = (most(seconds, key=seconds.__getitem__) for most in (min, max))
        parts.append(f"First at {target:.0%}: {first}, after {format_seconds(seconds[first])}.")
        if first != last:
            parts.append(f"Last: {last}, after {format_seconds(seconds[last])}.")
    if never := [name for name, pairs in found.items() if pairs is None]:
        parts.append(f"Not reached in every repeat within {budget} epochs: {', '.join(never)}.")
    title = f"To {target:.0%} held-out accuracy: {_where(record)}"
    return CaptionedFigure(
        draw_rows(columns, looks, f"not reached in {budget} epochs", title),
        alt=f"Bars of epochs and seconds to {target:.0%} held-out accuracy. {joined(*parts)}",
        caption=f"{joined(*parts)} Every epoch counts here, the first too. Bars are medians of "
        "the repeats (a seed each), whiskers their quartiles.",
    )


@drawn
def memory(record: Record) -> CaptionedFigure:
    """Peak memory of each contender in the main setting."""
    looks = {one["name"]: _look(one) for one in _ran(record)}
    found = {name: summary.peak_bytes(record, name) for name in looks}
    medians = {name: statistics.median(sizes) for name, sizes in found.items() if sizes}
    scale, unit = byte_unit(max(medians.values()))
    sizes = {name: [one / scale for one in found[name]] or None for name in looks}
    least, most = (choose(medians, key=medians.__getitem__) for choose in (min, max))
    said = f"Least: {least}, {format_bytes(medians[least])}. "
    said += f"Most: {most}, {format_bytes(medians[most])}."
    title = f"Peak memory of a rank: {_where(record)}"
    return CaptionedFigure(
        draw_rows({f"peak memory ({unit})": sizes}, looks, "unknown", title),
        alt=f"Bars of the peak memory by contender. {said}",
        caption=f"{said} {summary.MEMORY_RULE} Bars are {_REPEATS}",
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
    shares, factors = [], {}
    for name, epochs in found.items():
        whole = sum(epochs[-1].values())
        kinds = sorted(epochs[-1], key=epochs[-1].__getitem__, reverse=True)[:3]
        shares.append(f"{name} {', '.join(f'{k} {epochs[-1][k] / whole:.0%}' for k in kinds)}")
        first, *others = (sum(row.values()) for row in epochs)
        if others:
            factors[name] = first / statistics.median(others)
    warm_up = "One epoch each, with its warm-up."
    if factors:
        least, most = (choose(factors, key=factors.__getitem__) for choose in (min, max))
        warm_up = f"First epoch / median of the others: {format_number(factors[least])} ({least}) "
        warm_up += f"to {format_number(factors[most])} ({most})."
    return CaptionedFigure(
        figure,
        alt=f"{title}: a panel per contender. In the last epoch: {'; '.join(shares)}.",
        caption=f"{warm_up} Means over the ranks of a panel, medians of the repeats; evaluation "
        "is outside the epochs.",
    )


@drawn
def loading(record: Record) -> CaptionedFigure:
    """Seconds to load the data set once, and to read all its batches in an epoch, by its size."""
    once = {row["train_size"]: row["seconds"] for row in record["loading"]}
    main, read = record["settings"][0], {}
    for run in runs_of_single(record):
        setting = record["settings"][run["setting"]]
        if setting["batch_size"] == main["batch_size"] and run.get("epoch_phases_s"):
            (epochs,) = run["epoch_phases_s"].values()
            data = [epoch.get("data", 0.0) for epoch in epochs]
            read.setdefault(setting["train_size"], []).append(statistics.median(data[1:] or data))
    read = dict(sorted(read.items()))
    lines = {"load the data set, once per rank": once, "read an epoch's batches": read}
    title = "Loading by training samples"
    figure, axes = new_axes(3.4, title)
    for (name, points), (style, marker, line) in zip(lines.items(), SERIES):
        spreads = [Spread.of([1e3 * one for one in repeats]) for repeats in points.values()]
        look = {"color": style.color, "marker": marker, "linestyle": line, "label": name}
        whiskers = list(zip(*(spread.whiskers for spread in spreads))) or None
        middle = [spread.median for spread in spreads]
        axes.errorbar(list(points), middle, whiskers, capsize=3, linewidth=1.4, **look)
    axes.set(xscale="log", yscale="log", xlabel="training samples", ylabel="time (ms)")
    axes.set_xticks(list(once), [f"{size:,}" for size in once])
    axes.minorticks_off()
    axes.grid()
    axes.legend()
    said = _ends({name: points for name, points in lines.items()}, "samples", format_seconds)
    return CaptionedFigure(
        figure,
        alt=f"{title}. {said}",
        caption=f"{said} Points are {_REPEATS} Batches of one device.",
    )


def runs_of_single(record: Record) -> list[dict]:
    """The runs of one device, in all settings."""
    return [run for run in record["runs"] if run["contender"] == SINGLE]


def _ran(record: Record) -> list[dict]:
    names = present(record)
    return [one for one in record["contenders"] if one["name"] in names]


def _ours(record: Record) -> list[str]:
    return [one["name"] for one in _ran(record) if not one["builtin"] and one["name"] != SINGLE]


def _look(contender: dict) -> str:
    if contender["name"] == SINGLE:
        return ONE
    if not contender["builtin"]:
        return OURS
    return THEIRS_ON_OURS if contender["backend"] == "labkit" else THEIRS


def _panels(record: Record, points: Mapping[str, Points]) -> dict[str, dict[str, Points]]:
    """``{technique: {look: points}}``: a panel per technique, a line per contender that ran."""
    panels = {}
    for one in _ran(record):
        if one["name"] in _ours(record):
            theirs = one["counterpart"]
            members = {OURS: one["name"], THEIRS: theirs, THEIRS_ON_OURS: f"{theirs} (labkit)"}
            members[ONE] = SINGLE
            lines = {look: points[who] for look, who in members.items() if points.get(who)}
            panels[one["name"]] = lines
    return panels


def _where(record: Record) -> str:
    main = record["settings"][0]
    ranks = format_count(main["world_size"], "rank")
    return f"{ranks}, batches of {main['batch_size']}"


def _ends(points: Mapping[str, Points], unit: str, text: Callable[[float], str]) -> str:
    """Each series in words: its values at the smallest and at the largest x."""
    parts = []
    for name, by_x in points.items():
        if by_x:
            ends = dict.fromkeys([min(by_x), max(by_x)])
            values = (f"{text(statistics.median(by_x[x]))} at {x:,}" for x in ends)
            parts.append(f"{name} {', '.join(values)}")
    return f"By {unit}: {'; '.join(parts)}."
