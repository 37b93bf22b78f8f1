"""The numbers and tables of a record: pure functions of the recorded dict.

Epoch time: the median of a run's epochs without the first, which is warm-up (or the only epoch
that it has). Time to accuracy counts every epoch, including the first, which also trains. Neither
contains launch or evaluation.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from labkit.comm.peak_memory import PeakMemory
from labkit.units import format_bytes, format_count, format_number, format_seconds
from workbook.measure.compare.contenders import SINGLE
from workbook.measure.spread import Spread, ratios, table

Record = dict[str, Any]
MEMORY_RULE = (
    "Peak memory is that of the rank, or the GPU, that took most during the steps: model, "
    "gradients, optimizer, activations and messages. Replicas in one process on the CPU count "
    "together."
)


def epoch_seconds(run: dict) -> float:
    """The median epoch of a run, warm-up left out."""
    seconds = [epoch["seconds"] for epoch in run["epochs"]]
    return statistics.median(seconds[1:] or seconds)


def runs_of(record: Record, contender: str, setting: int = 0) -> list[dict]:
    """The runs of a contender in a setting, by repeat; setting 0 is the main one."""
    wanted = (contender, setting)
    found = [run for run in record["runs"] if (run["contender"], run["setting"]) == wanted]
    return sorted(found, key=lambda run: run["repeat"])


def epoch_times(record: Record, contender: str, setting: int = 0) -> list[float]:
    """Seconds of an epoch, one number per repeat."""
    return [epoch_seconds(run) for run in runs_of(record, contender, setting)]


def present(record: Record) -> list[str]:
    """The names of the contenders that ran in the main setting, in the record's order."""
    ran = {run["contender"] for run in record["runs"] if run["setting"] == 0}
    return [one["name"] for one in record["contenders"] if one["name"] in ran]


def to_target(run: dict, target: float) -> tuple[int, float] | None:
    """(epochs, seconds) until the held-out accuracy is first ``target``; None if it never is."""
    seconds = 0.0
    for number, epoch in enumerate(run["epochs"], start=1):
        seconds += epoch["seconds"]
        if epoch["test_accuracy"] >= target:
            return number, seconds
    return None


def reached(record: Record, contender: str) -> list[tuple[int, float]] | None:
    """(epochs, seconds) to the target by repeat; None if any repeat never reached it."""
    target = record["config"]["target"]
    runs = runs_of(record, contender)
    found = [times for run in runs if (times := to_target(run, target))]
    return found if found and len(found) == len(runs) else None


def varies(record: Record, field: str) -> bool:
    """Whether the record has settings that differ in ``field``."""
    return len({setting[field] for setting in record["settings"]}) > 1


def series(record: Record, contender: str, field: str) -> dict[int, list[float]]:
    """Epoch times by the values of a field, with all else as in the main setting.

    ``field`` is ``world_size``, ``train_size`` or ``batch_size``. One device has only one world
    size, so by ``world_size`` it has one value, at 1.
    """
    one_rank = contender == SINGLE and field == "world_size"
    return {
        1 if one_rank else setting[field]: times
        for index, setting in _varied(record, field)
        if (times := epoch_times(record, contender, index))
    }


def _varied(record: Record, field: str) -> list[tuple[int, dict[str, int]]]:
    """(index, setting) of all that differ from the main one only in ``field``, sorted by it."""
    main = record["settings"][0]
    others = {"world_size", "train_size", "batch_size"} - {field}
    found = [
        (index, setting)
        for index, setting in enumerate(record["settings"])
        if all(setting[name] == main[name] for name in others)
    ]
    return sorted(found, key=lambda pair: pair[1][field])


def efficiency(record: Record, contender: str) -> dict[int, list[float]]:
    """By world size: epoch time of one device / (epoch time x devices used), by repeat.

    On the CPU, one device computes on all cores, which any number of ranks share: they count as
    one device. On GPUs, each rank uses one device, as long as there are enough.
    """
    if contender == SINGLE:
        return {}
    one = {run["repeat"]: epoch_seconds(run) for run in runs_of(record, SINGLE)}
    found = {}
    for index, setting in _varied(record, "world_size"):
        used = max(1, min(setting["world_size"], record["config"]["gpus_used"]))
        found[setting["world_size"]] = [
            one[run["repeat"]] / (epoch_seconds(run) * used)
            for run in runs_of(record, contender, index)
            if run["repeat"] in one
        ]
    return {world_size: values for world_size, values in found.items() if values}


def against_pytorch(record: Record, contender: dict) -> list[float]:
    """PyTorch's epoch / ours, repeat by repeat: above 1 ours is faster."""
    if contender["counterpart"] is None:
        return []
    ours = {r["repeat"]: epoch_seconds(r) for r in runs_of(record, contender["name"])}
    theirs = runs_of(record, contender["counterpart"])
    pairs = [(epoch_seconds(r), ours[r["repeat"]]) for r in theirs if r["repeat"] in ours]
    return ratios(*zip(*pairs)) if pairs else []


def peak_bytes(record: Record, contender: str, setting: int = 0) -> list[float]:
    """By repeat, the peak memory of the rank, or the GPU, that took most; empty if unknown."""
    found: list[float] = []
    for run in runs_of(record, contender, setting):
        peaks = [PeakMemory(**one) for one in run.get("peak_memory", ()) if one]
        sizes = [peak.largest_bytes for peak in peaks]
        if not sizes or None in sizes:
            return []
        found.append(max(filter(None, sizes), default=0))
    return found


def phases(record: Record) -> dict[str, dict[str, float]]:
    """``{bar: {kind: seconds}}`` of an epoch in the main setting, medians of the repeats.

    A bar is as long as the epoch. Time outside all spans is ``other``. Where several threads of a
    rank record spans, these are scaled to fit.
    """
    bars = {}
    for name in present(record):
        runs = runs_of(record, name)
        whole = statistics.median(map(epoch_seconds, runs))
        roles = runs[0]["phases_s"]
        for role in roles:
            rows = [run["phases_s"].get(role, {}) for run in runs]
            kinds = sorted({kind for row in rows for kind in row} - {"evaluate"})
            row = {k: statistics.median(one.get(k, 0.0) for one in rows) for k in kinds}
            label = name if len(roles) == 1 else f"{name}: {role}"
            bars[label] = filled(row, whole)
    return bars


def filled(seconds: Mapping[str, float], whole: float) -> dict[str, float]:
    """Seconds by kind that add up to ``whole``: with ``other``, or scaled to fit."""
    total = sum(seconds.values())
    if total > whole:
        return {kind: s * whole / total for kind, s in seconds.items()}
    return dict(seconds) | {"other": whole - total}


def report(record: Record) -> str:
    """The tables that the command prints."""
    parts = [_headline(record), _main_table(record)]
    heads = {"world_size": "P = {}", "train_size": "{} samples", "batch_size": "batches of {}"}
    parts += [_by(record, field, head) for field, head in heads.items() if varies(record, field)]
    return "\n\n".join([*parts, *_remarks(record)])


def _headline(record: Record) -> str:
    config, main, hardware = record["config"], record["settings"][0], record["hardware"]
    cores = format_count(hardware["cores"], "core")
    machine = ", ".join(hardware["gpus"]) or f"{cores} of {hardware['cpu']}"
    return (
        f"{config['model']} on {config['dataset']}: {main['train_size']} samples, global batch "
        f"{main['batch_size']}, {main['epochs']} epochs, world size {main['world_size']}; "
        f"{machine}\nmedians of repeats (quartiles), contenders in turns; an epoch's time leaves "
        "out the first epoch (warm-up), evaluation and launch"
    )


def _main_table(record: Record) -> str:
    target = f"{record['config']['target']:.0%}"
    header = ["contender", "epoch", "PyTorch's / ours", f"epochs to {target}", f"time to {target}"]
    header += ["accuracy", "from one device", "replicas", "sent per rank", "peak memory"]
    by_name = {one["name"]: one for one in record["contenders"]}
    return table(header, [_main_row(record, by_name[name]) for name in present(record)])


def _main_row(record: Record, contender: dict) -> list[str]:
    name = contender["name"]
    runs, to_reach = runs_of(record, name), ["not reached"] * 2
    if times := reached(record, name):
        epochs, seconds = map(statistics.median, zip(*times))
        to_reach = [format_number(epochs), format_seconds(seconds)]
    far = [run["difference_from_single"] for run in runs if "difference_from_single" in run]
    accuracy = statistics.median(run["epochs"][-1]["test_accuracy"] for run in runs)
    return [
        name,
        _spread(epoch_times(record, name), format_seconds),
        _spread(against_pytorch(record, contender), format_number),
        *to_reach,
        f"{accuracy:.1%}",
        "own pace" if contender["own_pace"] else _farthest(far),
        "equal" if all(run["replicas_agree"] for run in runs) else "DIFFERENT",
        _most_sent(runs),
        _spread(peak_bytes(record, name), format_bytes),
    ]


def _farthest(differences: list[float | None]) -> str:
    finite = [one for one in differences if one is not None]
    if len(finite) < len(differences):
        return "not finite"
    return f"{max(finite):.1g}" if finite else "-"


def _most_sent(runs: list[dict]) -> str:
    """Bytes sent by the rank that sends the most; "-" where bytes are not counted."""
    most = [max(run["bytes_sent"]) for run in runs if run.get("bytes_sent")]
    return format_bytes(statistics.median(most)) if most else "-"


def _spread(repeats: list[float], text: Callable[[float], str]) -> str:
    if not repeats:
        return "-"
    return Spread.of(repeats).text(text) if len(repeats) > 1 else text(repeats[0])


def _by(record: Record, field: str, head: str) -> str:
    times = {name: series(record, name, field) for name in present(record)}
    values = sorted({value for by_value in times.values() for value in by_value})
    rows = []
    for name, by_value in times.items():
        parts = efficiency(record, name) if field == "world_size" else {}
        rows.append([name, *(_cell(by_value.get(value), parts.get(value)) for value in values)])
    return table([f"epoch by {field}", *map(head.format, values)], rows)


def _cell(times: list[float] | None, parts: list[float] | None) -> str:
    if not times:
        return "-"
    text = format_seconds(statistics.median(times))
    return f"{text}, {statistics.median(parts):.0%}" if parts else text


def _remarks(record: Record) -> list[str]:
    lines = [efficiency_rule(record)] if len(record["settings"]) > 1 else []
    lines += [rule] if (rule := ranks_rule(record)) else []
    lines += [MEMORY_RULE] if any(peak_bytes(record, name) for name in present(record)) else []
    for row in record["skipped"]:
        what = "failed" if row["failed"] else "not run"
        ranks = format_count(row["world_size"], "rank")
        lines.append(f"{what}: {row['contender']} on {ranks}: {row['reason']}")
    notes = {run["contender"]: run["note"] for run in record["runs"] if run["note"]}
    lines += [f"{name}: {note}" for name, note in notes.items()]
    return ["\n".join(lines)] if lines else []


def ranks_rule(record: Record) -> str:
    """A sentence on the roles of the ranks, where not all are workers; else empty."""
    roles: dict[str, set[str]] = {}
    for run in record["runs"]:
        roles.setdefault(run["contender"], set()).update(run["phases_s"])
    serving = ", ".join(name for name, its in roles.items() if {"worker", "server"} <= its)
    staged = ", ".join(name for name, its in roles.items() if "stage" in its)
    parts = []
    if serving:
        parts.append(f"Of the ranks of {serving} one only serves: N ranks are N - 1 workers.")
    if staged:
        parts.append(
            f"The ranks of {staged} share the layers, not the batch: N ranks are N stages."
        )
    return " ".join(parts)


def efficiency_rule(record: Record) -> str:
    """What the percentages by ranks mean on this machine, in a sentence or two."""
    gpus, cores = record["config"]["gpus_used"], record["hardware"]["cores"]
    start = "Efficiency is the epoch time of one device / (epoch time x devices used)"
    if gpus:
        return f"{start}; this machine has {gpus} GPUs, and more ranks than that share them."
    return (
        f"{start}. Here all ranks share the {cores} cores that one device also uses, so together "
        "they count as one device: at 100% they are as fast as one device. More "
        f"ranks do not add cores, and more than {cores} ranks take turns on them."
    )
