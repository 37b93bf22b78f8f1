"""The figures of a record: pure functions from the recorded dict to a captioned figure."""

import statistics
from collections.abc import Callable

from labkit.bench.compare.contenders import SINGLE
from labkit.bench.compare.panels import (
    ONE,
    OURS,
    THEIRS,
    THEIRS_ON_OURS,
    Axis,
    draw_panels,
    draw_rows,
)
from labkit.bench.compare.summary import (
    Record,
    efficiency,
    efficiency_rule,
    epoch_times,
    phases,
    present,
    ranks_rule,
    reached,
    runs_of,
    series,
)
from labkit.plots import learning_curves, phases as draw_phases
from labkit.plots.figure import CaptionedFigure, drawn
from labkit.trace import LOCAL_KINDS
from labkit.units import format_count, format_number, format_seconds

# By x: the repeats.
Points = dict[int, list[float]]
_WARM_UP = "Epoch times leave out each run's first epoch (warm-up), evaluation and launch."


def draw(record: Record) -> dict[str, CaptionedFigure]:
    """By name, every figure that the record has the runs for."""
    if not present(record):
        return {}
    found = {"curves": curves(record)}
    if any(one["builtin"] for one in _ran(record)):
        found["curves_pytorch"] = curves(record, builtin=True)
    found |= {"phases": epoch_phases(record), "time_to_accuracy": time_to_accuracy(record)}
    if not _techniques(record):
        return found
    if _varies(record, "world_size"):
        found["ranks"] = by_ranks(record)
        if SINGLE in present(record):
            found["efficiency"] = by_efficiency(record)
    if _varies(record, "train_size"):
        found["train_size"] = by_train_size(record)
    if _varies(record, "batch_size"):
        found["batch_size"] = by_batch_size(record)
    return found


def curves(record: Record, *, builtin: bool = False) -> CaptionedFigure:
    """Loss and held-out accuracy, by epoch and by second: our techniques, or PyTorch's."""
    names = [one["name"] for one in _ran(record) if one["builtin"] == builtin]
    names = list(dict.fromkeys([SINGLE, *names] if SINGLE in present(record) else names))
    repeats = {name: [run["epochs"] for run in runs_of(record, name)] for name in names}
    whose = "PyTorch's own" if builtin else "Ours"
    return learning_curves(repeats, title=f"{whose}: {_where(record)}")


def epoch_phases(record: Record) -> CaptionedFigure:
    """Where an epoch's time goes, a stacked bar per contender."""
    figure = draw_phases(phases(record), title=f"Where an epoch goes: {_where(record)}")
    told = f"{figure.caption} Means over the ranks of a bar, medians of the repeats."
    parts = [told, _unseen(record), _WARM_UP]
    caption = " ".join(filter(None, parts))
    return CaptionedFigure(figure.figure, alt=figure.alt, caption=caption)


def _unseen(record: Record) -> str:
    """Whose communication has no spans: that of PyTorch's DDP runs inside backward."""
    names = []
    for one in _ran(record):
        phases_s = [run["phases_s"] for run in runs_of(record, one["name"])]
        kinds = {kind for roles in phases_s for row in roles.values() for kind in row}
        if one["builtin"] and kinds <= LOCAL_KINDS | {"wait"}:
            names.append(one["name"])
    return f"What {', '.join(names)} may communicate is in compute." if names else ""


def by_ranks(record: Record) -> CaptionedFigure:
    """Epoch time by number of ranks, a panel per technique."""
    told = " ".join(filter(None, [_fastest(record), _slowed(record), ranks_rule(record)]))
    return _epoch_time(record, "world_size", Axis("ranks"), told, "by ranks")


def by_train_size(record: Record) -> CaptionedFigure:
    """Epoch time by number of training samples."""
    x, told = Axis("training samples", doubling=True), _growth(record, "train_size", "samples")
    return _epoch_time(record, "train_size", x, told, "by training samples")


def by_batch_size(record: Record) -> CaptionedFigure:
    """Epoch time by global batch: a larger one has fewer steps, so fewer synchronisations."""
    x = Axis("global batch (samples)", doubling=True)
    told = _growth(record, "batch_size", "samples a batch")
    return _epoch_time(record, "batch_size", x, told, "by batch")


@drawn
def _epoch_time(record: Record, field: str, x: Axis, told: str, title: str) -> CaptionedFigure:
    panels = _panels(record, lambda name: series(record, name, field))
    figure = draw_panels(panels, x, Axis("epoch time (s)"), f"Epoch time {title}")
    caption = f"{told} {_WARM_UP} Points are medians of the repeats, whiskers their quartiles."
    points = {name: series(record, name, field) for name in present(record)}
    ends = _ends(points, x.label, format_seconds)
    return CaptionedFigure(figure, alt=f"Epoch time {title}. {ends}", caption=caption)


@drawn
def by_efficiency(record: Record) -> CaptionedFigure:
    """Efficiency by number of ranks; ``summary.efficiency`` says what it is."""

    def percent(name: str) -> Points:
        if name == SINGLE:
            return {1: [100.0]}
        found = efficiency(record, name).items()
        return {ranks: [100 * one for one in repeats] for ranks, repeats in found}

    told = _ends({n: efficiency(record, n) for n in _ours(record)}, "ranks", "{:.0%}".format)
    panels, y = _panels(record, percent), Axis("efficiency (%)")
    return CaptionedFigure(
        draw_panels(panels, Axis("ranks"), y, "Efficiency by ranks"),
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
        parts.append(f"Not there in every repeat after {budget} epochs: {', '.join(never)}.")
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


def _techniques(record: Record) -> dict[str, dict[str, str]]:
    """By technique, by look: the contender that is drawn in its panel."""
    by_name = {one["name"]: one for one in _ran(record)}
    found = {}
    for name in _ours(record):
        theirs = by_name[name]["counterpart"]
        members = {OURS: name, THEIRS: theirs, THEIRS_ON_OURS: f"{theirs} (labkit)", ONE: SINGLE}
        found[name] = {look: other for look, other in members.items() if other in by_name}
    return found


def _panels(record: Record, points_of: Callable[[str], Points]) -> dict[str, dict[str, Points]]:
    """By technique, by look: the points, where a contender has some."""
    return {
        technique: {look: points for look, name in members.items() if (points := points_of(name))}
        for technique, members in _techniques(record).items()
    }


def _varies(record: Record, field: str) -> bool:
    return len({setting[field] for setting in record["settings"]}) > 1


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
    """What the most ranks cost against those of the main setting."""
    main = record["settings"][0]["world_size"]
    ratios = {}
    for name in _ours(record):
        points = series(record, name, "world_size")
        most = max(points, default=main)
        if most > main and main in points:
            ratios[name] = statistics.median(points[most]) / statistics.median(points[main])
    if not ratios:
        return ""
    most = max(setting["world_size"] for setting in record["settings"])
    parts = ", ".join(f"{name} {format_number(ratio)}" for name, ratio in ratios.items())
    return f"Epoch on {most} ranks / epoch on {main}: {parts}."


def _growth(record: Record, field: str, unit: str) -> str:
    """How the epoch changes from the least to the most, for ours."""
    by_name = {name: series(record, name, field) for name in _ours(record)}
    values = [x for points in by_name.values() for x in points]
    least, most = min(values), max(values)
    if least == most:
        return f"Only {most:,} {unit} have times: nothing else ran."
    parts = [
        f"{name} {format_number(statistics.median(p[most]) / statistics.median(p[least]))}"
        for name, p in by_name.items()
        if least in p and most in p
    ]
    return (
        f"Epoch at {most:,} {unit} / epoch at {least:,}, which is {format_number(most / least)} "
        f"times as many: {', '.join(parts)}."
    )


def _ends(points: dict[str, Points], unit: str, text: Callable[[float], str]) -> str:
    """Each series in words: its first and its last value."""
    parts = []
    for name, by_x in points.items():
        if by_x:
            ends = dict.fromkeys([min(by_x), max(by_x)])
            values = (f"{text(statistics.median(by_x[x]))} at {x:,}" for x in ends)
            parts.append(f"{name} {', '.join(values)}")
    return f"By {unit}: {'; '.join(parts)}."
