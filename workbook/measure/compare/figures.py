"""The figures of a record: pure functions from the recorded dict to a captioned figure."""

import statistics
from collections.abc import Callable

from labkit.tracing import LOCAL_KINDS
from labkit.units import byte_unit, format_bytes, format_count, format_number, format_seconds
from workbook.measure.compare.by_epoch import breakdown, epoch_breakdowns, loading
from workbook.measure.compare.contenders import SINGLE
from workbook.measure.compare.panels import (
    ONE,
    OURS,
    THEIRS,
    THEIRS_ON_OURS,
    draw_panels,
    draw_rows,
)
from workbook.measure.compare.summary import (
    MEMORY_RULE,
    Record,
    efficiency,
    efficiency_rule,
    epoch_times,
    peak_bytes,
    phases,
    present,
    ranks_rule,
    reached,
    runs_of,
    series,
    varies,
)
from workbook.plots import learning_curves, phases as draw_phases
from workbook.plots.figure import CaptionedFigure, drawn

# {x: repeats}
Points = dict[int, list[float]]
# {what varies: (label of the x axis, title of the figure)}
_BY = {
    "world_size": ("ranks", "Epoch time by ranks"),
    "train_size": ("training samples", "Epoch time by training samples"),
    "batch_size": ("global batch (samples)", "Epoch time by batch"),
}
_WARM_UP = "Epoch times leave out each run's first epoch (warm-up), evaluation and launch."


def draw(record: Record) -> dict[str, CaptionedFigure]:
    """The figures for which the record has runs, by name."""
    if not present(record):
        return {}
    found = {"curves": curves(record)}
    if any(one["builtin"] for one in _ran(record)):
        found["curves_pytorch"] = curves(record, builtin=True)
    found |= {"phases": epoch_phases(record), "time_to_accuracy": time_to_accuracy(record)}
    if epoch_breakdowns(record):
        found["epochs"] = breakdown(record)
    if record.get("loading"):
        found["loading"] = loading(record)
    if any(peak_bytes(record, name) for name in present(record)):
        found["memory"] = memory(record)
    if not _ours(record):
        return found
    if varies(record, "world_size"):
        found["ranks"] = by_ranks(record)
        if SINGLE in present(record):
            found["efficiency"] = by_efficiency(record)
    for field, unit in (("train_size", "samples"), ("batch_size", "samples per batch")):
        if varies(record, field):
            found[field] = _epoch_time(record, field, _growth(record, field, unit))
    return found


def curves(record: Record, *, builtin: bool = False) -> CaptionedFigure:
    """Loss and held-out accuracy, by epoch and by second: our techniques, or PyTorch's."""
    names = [one["name"] for one in _ran(record) if one["builtin"] == builtin]
    names = list(dict.fromkeys([SINGLE, *names] if SINGLE in present(record) else names))
    repeats = {name: [run["epochs"] for run in runs_of(record, name)] for name in names}
    whose = "PyTorch's own" if builtin else "Ours"
    return learning_curves(repeats, title=f"{whose}: {_where(record)}", training=True)


def epoch_phases(record: Record) -> CaptionedFigure:
    """The time of an epoch by phase, one stacked bar per contender."""
    figure = draw_phases(phases(record), title=f"Where an epoch goes: {_where(record)}")
    told = f"{figure.caption} Means over the ranks of a bar, medians of the repeats."
    caption = " ".join(filter(None, [told, _unseen(record), _WARM_UP]))
    return CaptionedFigure(figure.figure, alt=figure.alt, caption=caption)


def _unseen(record: Record) -> str:
    """A sentence on contenders whose communication has no spans (PyTorch's DDP: in backward)."""
    names = []
    for one in _ran(record):
        phases_s = [run["phases_s"] for run in runs_of(record, one["name"])]
        kinds = {kind for roles in phases_s for row in roles.values() for kind in row}
        if one["builtin"] and kinds <= LOCAL_KINDS | {"wait"}:
            names.append(one["name"])
    return f"Communication of {', '.join(names)}, if any, is part of compute." if names else ""


def by_ranks(record: Record) -> CaptionedFigure:
    """Epoch time by number of ranks, a panel per technique."""
    told = " ".join(filter(None, [_fastest(record), _slowed(record), ranks_rule(record)]))
    return _epoch_time(record, "world_size", told)


@drawn
def _epoch_time(record: Record, field: str, told: str) -> CaptionedFigure:
    x, title = _BY[field]
    points = {name: series(record, name, field) for name in present(record)}
    panels = _panels(record, points)
    return CaptionedFigure(
        draw_panels(panels, x, "epoch time (s)", title, doubling=field != "world_size"),
        alt=f"{title}. {_ends(points, x, format_seconds)}",
        caption=f"{told} {_WARM_UP} Points are medians of the repeats, whiskers their quartiles.",
    )


@drawn
def by_efficiency(record: Record) -> CaptionedFigure:
    """Efficiency by number of ranks; ``summary.efficiency`` says what it is."""
    found = {name: efficiency(record, name) for name in present(record)}
    percent = {
        name: {ranks: [100 * one for one in repeats] for ranks, repeats in by_ranks.items()}
        for name, by_ranks in found.items()
    }
    panels = _panels(record, percent | {SINGLE: {1: [100.0]}})
    told = _ends({name: found[name] for name in _ours(record)}, "ranks", "{:.0%}".format)
    return CaptionedFigure(
        draw_panels(panels, "ranks", "efficiency (%)", "Efficiency by ranks"),
        alt=f"Efficiency by ranks. {told}",
        caption=f"{told} {efficiency_rule(record)}",
    )


@drawn
def time_to_accuracy(record: Record) -> CaptionedFigure:
    """Epochs and seconds of training to the target accuracy on held-out samples."""
    target, budget = record["config"]["target"], record["settings"][0]["epochs"]
    looks = {one["name"]: _look(one) for one in _ran(record)}
    found = {name: reached(record, name) for name in looks}
    columns = {
        quantity: {n: None if p is None else [one[at] for one in p] for n, p in found.items()}
        for at, quantity in enumerate(("epochs", "training time (s)"))
    }
    missing = f"not reached in {budget} epochs"
    title = f"To {target:.0%} held-out accuracy: {_where(record)}"
    told = _first_to(found, target, budget)
    return CaptionedFigure(
        draw_rows(columns, looks, missing, title),
        alt=f"Bars of epochs and seconds to {target:.0%} held-out accuracy. {told}",
        caption=f"{told} Every epoch counts here, the first too. Bars are medians of the repeats "
        "(a seed each), whiskers their quartiles.",
    )


@drawn
def memory(record: Record) -> CaptionedFigure:
    """Peak memory of each contender in the main setting."""
    looks = {one["name"]: _look(one) for one in _ran(record)}
    found = {name: peak_bytes(record, name) for name in looks}
    medians = {name: statistics.median(sizes) for name, sizes in found.items() if sizes}
    scale, unit = byte_unit(max(medians.values()))
    sizes = {name: [one / scale for one in found[name]] or None for name in looks}
    least, most = (choose(medians, key=medians.__getitem__) for choose in (min, max))
    told = f"Least: {least}, {format_bytes(medians[least])}."
    if medians[most] > medians[least]:
        told += f" Most: {most}, {format_bytes(medians[most])}."
    title = f"Peak memory of a rank: {_where(record)}"
    return CaptionedFigure(
        draw_rows({f"peak memory ({unit})": sizes}, looks, "unknown", title),
        alt=f"Bars of the peak memory by contender. {told}",
        caption=f"{told} {MEMORY_RULE} Bars are medians of the repeats, whiskers their quartiles.",
    )


def _first_to(found: dict[str, list | None], target: float, budget: int) -> str:
    seconds = {n: statistics.median(s for _, s in pairs) for n, pairs in found.items() if pairs}
    never = [name for name, pairs in found.items() if pairs is None]
    parts = []
    if seconds:
        first, last = (most(seconds, key=seconds.__getitem__) for most in (min, max))
        parts.append(f"First at {target:.0%}: {first}, after {format_seconds(seconds[first])}.")
        if first != last:
            parts.append(f"Last: {last}, after {format_seconds(seconds[last])}.")
    if never:
        parts.append(f"Not reached in every repeat within {budget} epochs: {', '.join(never)}.")
    return " ".join(parts)


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


def _panels(record: Record, points: dict[str, Points]) -> dict[str, dict[str, Points]]:
    """``{technique: {look: points}}``: a panel per technique, a line per contender that ran."""
    panels = {}
    counterparts = {one["name"]: one["counterpart"] for one in _ran(record)}
    for name in _ours(record):
        theirs = counterparts[name]
        members = {OURS: name, THEIRS: theirs, THEIRS_ON_OURS: f"{theirs} (labkit)", ONE: SINGLE}
        panels[name] = {look: points[who] for look, who in members.items() if points.get(who)}
    return panels


def _where(record: Record) -> str:
    main = record["settings"][0]
    ranks = format_count(main["world_size"], "rank")
    return f"{ranks}, batches of {main['batch_size']}"


def _fastest(record: Record) -> str:
    medians = {name: statistics.median(epoch_times(record, name)) for name in present(record)}
    best = min(medians, key=medians.__getitem__)
    text = f"On {_where(record)}, the fastest epoch is that of {best}: "
    text += format_seconds(medians[best])
    if SINGLE in medians and best != SINGLE:
        text += f" (one device: {format_seconds(medians[SINGLE])})"
    return f"{text}."


def _slowed(record: Record) -> str:
    """The epoch time on the most ranks relative to the main setting, as a sentence."""
    main = record["settings"][0]["world_size"]
    most = max(setting["world_size"] for setting in record["settings"])
    ratios = _ratios(record, "world_size", most, main)
    return f"Epoch on {most} ranks / epoch on {main}: {ratios}." if ratios and most > main else ""


def _ratios(record: Record, field: str, value: int, base: int) -> str:
    """Epoch time at ``value`` / epoch time at ``base``, for those of ours that have both."""
    points = {name: series(record, name, field) for name in _ours(record)}
    return ", ".join(
        f"{name} {format_number(statistics.median(p[value]) / statistics.median(p[base]))}"
        for name, p in points.items()
        if value in p and base in p
    )


def _growth(record: Record, field: str, unit: str) -> str:
    """How our epoch times change from the smallest value to the largest, as a sentence."""
    values = [x for name in _ours(record) for x in series(record, name, field)]
    least, most = min(values), max(values)
    if least == most:
        return f"Only the runs with {most:,} {unit} have times."
    return (
        f"Epoch at {most:,} {unit} / epoch at {least:,}, which is {format_number(most / least)} "
        f"times as many: {_ratios(record, field, most, least)}."
    )


def _ends(points: dict[str, Points], unit: str, text: Callable[[float], str]) -> str:
    """Each series in words: its values at the smallest and at the largest x."""
    parts = []
    for name, by_x in points.items():
        if by_x:
            ends = dict.fromkeys([min(by_x), max(by_x)])
            values = (f"{text(statistics.median(by_x[x]))} at {x:,}" for x in ends)
            parts.append(f"{name} {', '.join(values)}")
    return f"By {unit}: {'; '.join(parts)}."
