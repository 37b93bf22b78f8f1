"""The numbers and tables of a record: pure functions of the recorded dict.

Epoch time: the median of a run's epochs without the first, which is warm-up (or the only epoch
that it has). Time to accuracy counts every epoch, including the first, which also trains. Neither
contains launch or evaluation.
"""

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labkit.comm.peak_memory import PeakMemory
from labkit.units import format_bytes, format_count, format_number, format_seconds
from workbook.measure.spread import Spread, Table, ratios

SINGLE = "single"
Record = dict[str, Any]
_PARTS = ("config", "contenders", "settings", "runs", "skipped", "hardware", "versions")
MEMORY_RULE = (
    "Peak memory is that of the rank, or the GPU, that took most during the steps: model, "
    "gradients, optimizer, activations and messages. Replicas in one process on the CPU count "
    "together."
)


def load(path: str | Path) -> Record:
    """Read a record that ``labkit compare --json`` wrote.

    Raises:
        ValueError: the file is not a record.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        missing = [part for part in _PARTS if part not in record]
        if missing or not record["settings"]:
            raise ValueError(f"it lacks {', '.join(missing) or 'settings'}")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a record of labkit compare: {error}; give a file that its --json wrote"
        ) from None
    return record


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


def reached(record: Record, contender: str) -> list[tuple[int, float]] | None:
    """(epochs, seconds) until the held-out accuracy is first the target, by repeat.

    None if any repeat never reached it.
    """
    found = []
    for run in runs_of(record, contender):
        seconds = 0.0
        for number, epoch in enumerate(run["epochs"], start=1):
            seconds += epoch["seconds"]
            if epoch["test_accuracy"] >= record["config"]["target"]:
                found.append((number, seconds))
                break
        else:
            return None
    return found or None


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
    one = {run["repeat"]: epoch_seconds(run) for run in runs_of(record, SINGLE)}
    found = {}
    for index, setting in _varied(record, "world_size") if contender != SINGLE else ():
        used = max(1, min(setting["world_size"], record["config"]["gpus_used"]))
        found[setting["world_size"]] = [
            one[run["repeat"]] / (epoch_seconds(run) * used)
            for run in runs_of(record, contender, index)
            if run["repeat"] in one
        ]
    return {world_size: values for world_size, values in found.items() if values}


def against_pytorch(record: Record, contender: dict) -> list[float]:
    """PyTorch's epoch / ours, repeat by repeat: above 1 ours is faster."""
    ours = {r["repeat"]: epoch_seconds(r) for r in runs_of(record, contender["name"])}
    theirs = runs_of(record, contender["counterpart"] or "")
    pairs = [(epoch_seconds(r), ours[r["repeat"]]) for r in theirs if r["repeat"] in ours]
    return ratios(*zip(*pairs)) if pairs else []


def peak_bytes(record: Record, contender: str) -> list[float]:
    """By repeat, the peak memory of the rank, or the GPU, that took most; empty if unknown."""
    found: list[float] = []
    for run in runs_of(record, contender):
        sizes = [PeakMemory(**one).largest_bytes for one in run.get("peak_memory", ()) if one]
        if not sizes or None in sizes:
            return []
        found.append(max(filter(None, sizes), default=0))
    return found


def epoch_phases(record: Record, names: tuple[str, ...] = ()) -> dict[str, list[dict[str, float]]]:
    """Of each contender and role in the main setting: ``{kind: seconds}`` of every epoch.

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
            found[label] = []
            for number in range(min(len(run["epochs"]) for run in runs)):
                rows = [run["epoch_phases_s"].get(role, []) for run in runs]
                rows = [row[number] for row in rows if number < len(row)]
                whole = statistics.median(run["epochs"][number]["seconds"] for run in runs)
                kinds = sorted({kind for row in rows for kind in row})
                medians = {k: statistics.median(row.get(k, 0.0) for row in rows) for k in kinds}
                total = sum(medians.values())
                if total > whole:
                    medians = {kind: s * whole / total for kind, s in medians.items()}
                else:
                    medians["other"] = whole - total
                found[label].append(medians)
    return found


def report(record: Record) -> str:
    """The tables that the command prints."""
    config, main, hardware = record["config"], record["settings"][0], record["hardware"]
    cores = format_count(hardware["cores"], "core")
    machine = ", ".join(hardware["gpus"]) or f"{cores} of {hardware['cpu']}"
    headline = (
        f"{config['model']} on {config['dataset']}: {main['train_size']} samples, global batch "
        f"{main['batch_size']}, {main['epochs']} epochs, world size {main['world_size']}; "
        f"{machine}\nmedians of repeats (quartiles), contenders in turns; an epoch's time leaves "
        "out the first epoch (warm-up), evaluation and launch"
    )
    target = f"{config['target']:.0%}"
    heads = ("contender", "epoch", "PyTorch's / ours", f"epochs to {target}", f"time to {target}")
    heads += ("accuracy", "from one device", "replicas", "sent per rank", "peak memory")
    names = present(record)
    rows = [_main_row(record, one) for one in record["contenders"] if one["name"] in names]
    parts = [headline, str(Table(heads, tuple(rows)))]
    fields = {"world_size": "P = {}", "train_size": "{} samples", "batch_size": "batches of {}"}
    for field, head in fields.items():
        if not varies(record, field):
            continue
        times = {name: series(record, name, field) for name in names}
        values = sorted({value for by_value in times.values() for value in by_value})
        rows = []
        for name, by_value in times.items():
            parts_of = efficiency(record, name) if field == "world_size" else {}
            rows.append((name, *(_cell(by_value.get(v), parts_of.get(v)) for v in values)))
        heads = (f"epoch by {field}", *map(head.format, values))
        parts.append(str(Table(heads, tuple(rows))))
    lines = [efficiency_rule(record)] if varies(record, "world_size") else []
    lines += [rule] if (rule := ranks_rule(record)) else []
    lines += [MEMORY_RULE] if any(peak_bytes(record, name) for name in names) else []
    for row in record["skipped"]:
        what = "failed" if row["failed"] else "not run"
        ranks = format_count(row["world_size"], "rank")
        lines.append(f"{what}: {row['contender']} on {ranks}: {row['reason']}")
    notes = {run["contender"]: run["note"] for run in record["runs"] if run.get("note")}
    lines += [f"{name}: {note}" for name, note in notes.items()]
    return "\n\n".join([*parts, *(["\n".join(lines)] if lines else [])])


def _main_row(record: Record, contender: dict) -> tuple[str, ...]:
    name = contender["name"]
    runs, to_reach = runs_of(record, name), ["not reached"] * 2
    if times := reached(record, name):
        epochs, seconds = map(statistics.median, zip(*times))
        to_reach = [format_number(epochs), format_seconds(seconds)]
    far = [run["difference_from_single"] for run in runs if "difference_from_single" in run]
    # JSON has no NaN: in a run whose parameters diverged, null is stored instead.
    apart = f"{max(far):.1g}" if far and None not in far else "not finite" if far else "-"
    sent = [max(run["bytes_sent"]) for run in runs if run.get("bytes_sent")]
    accuracy = statistics.median(run["epochs"][-1]["test_accuracy"] for run in runs)
    return (
        name,
        _spread(epoch_times(record, name), format_seconds),
        _spread(against_pytorch(record, contender), format_number),
        *to_reach,
        f"{accuracy:.1%}",
        "own pace" if contender["own_pace"] else apart,
        "equal" if all(run["replicas_agree"] for run in runs) else "DIFFERENT",
        format_bytes(statistics.median(sent)) if sent else "-",
        _spread(peak_bytes(record, name), format_bytes),
    )


def _spread(repeats: list[float], text: Callable[[float], str]) -> str:
    if not repeats:
        return "-"
    return Spread.of(repeats).text(text) if len(repeats) > 1 else text(repeats[0])


def _cell(times: list[float] | None, parts: list[float] | None) -> str:
    if not times:
        return "-"
    text = format_seconds(statistics.median(times))
    return f"{text}, {statistics.median(parts):.0%}" if parts else text


def ranks_rule(record: Record) -> str:
    """A sentence on the roles of the ranks, where not all are workers; else empty."""
    roles: dict[str, set[str]] = {}
    for run in record["runs"]:
        roles.setdefault(run["contender"], set()).update(run.get("epoch_phases_s", {}))
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


def csv_tables(record: Record) -> dict[str, str]:
    """The record's numbers as CSV, by name: a row per epoch, per phase of an epoch, per loading.

    Every row names its contender and setting. What was not measured is left empty.
    """
    loads = [
        {"train_size": row["train_size"], "repeat": number, "seconds": seconds}
        for row in record.get("loading", ())
        for number, seconds in enumerate(row["seconds"], start=1)
    ]
    rows = {"epochs": list(_epoch_rows(record)), "phases": list(_phase_rows(record))}
    found = {}
    for name, table in (rows | {"loading": loads}).items():
        if table:
            text = io.StringIO()
            columns = dict.fromkeys(column for row in table for column in row)
            writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
            found[name] = text.getvalue()
    return found


def _named(record: Record, run: dict) -> dict[str, Any]:
    setting = {k: v for k, v in record["settings"][run["setting"]].items() if k != "epochs"}
    return {"contender": run["contender"], **setting, "repeat": run["repeat"] + 1}


def _epoch_rows(record: Record) -> Iterator[dict[str, Any]]:
    for run in record["runs"]:
        passed_s = 0.0
        for number, epoch in enumerate(run["epochs"], start=1):
            passed_s += epoch["seconds"]
            at = {"epoch": number, "passed_s": round(passed_s, 6)}
            yield _named(record, run) | at | epoch


def _phase_rows(record: Record) -> Iterator[dict[str, Any]]:
    for run in record["runs"]:
        for role, epochs in run.get("epoch_phases_s", {}).items():
            for number, kinds in enumerate(epochs, start=1):
                for kind, seconds in kinds.items():
                    row = {"epoch": number, "role": role, "kind": kind, "seconds": seconds}
                    yield _named(record, run) | row
