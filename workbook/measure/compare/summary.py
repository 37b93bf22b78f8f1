"""The numbers and tables of a record: pure functions of the recorded dict.

Epoch time: the median of a run's epochs without the first, which is warm-up (or the only epoch
that it has). Time to accuracy counts every epoch, including the first, which also trains. Neither
contains launch or evaluation.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit.engine.comm.peak_memory import PeakMemory
from labkit.units import format_bytes, format_count, format_number, format_seconds
from workbook.measure.record import Spread, Table, ratios

SINGLE = "single"
Record = dict[str, Any]
_RULES = """\
Medians of repeats (quartiles), contenders in turns; an epoch's time leaves out the first epoch
(warm-up), evaluation and launch. The difference from one device is that of the worst repeat. Of
the ranks of a parameter server one only serves, and those of a split model are stages. More ranks
than cores or GPUs take turns on them. Peak memory is that of the rank, or the GPU, that took most
during the steps."""


def load(path: str | Path) -> Record:
    """Read a record that ``labkit compare --json`` wrote."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def runs_of(record: Record, contender: str, setting: int = 0) -> list[dict]:
    """The runs of a contender in a setting, by repeat; setting 0 is the main one."""
    key = (contender, setting)
    return [run for run in record["runs"] if (run["contender"], run["setting"]) == key]


def epoch_times(record: Record, contender: str, setting: int = 0) -> list[float]:
    """Seconds of an epoch, one number per repeat: the median of a run, warm-up left out."""
    times = []
    for run in runs_of(record, contender, setting):
        seconds = [epoch["seconds"] for epoch in run["epochs"]]
        times.append(statistics.median(seconds[1:] or seconds))
    return times


def present(record: Record) -> dict[str, dict]:
    """The contenders that ran in the main setting, by name, in the record's order."""
    by_name = {contender["name"]: contender for contender in record["contenders"]}
    return {name: contender for name, contender in by_name.items() if runs_of(record, name)}


def reached(record: Record, contender: str) -> list[tuple[int, float]] | None:
    """(epochs, seconds) until the held-out accuracy is first the target, by repeat.

    None if any repeat never reached it.
    """
    pairs = []
    for run in runs_of(record, contender):
        seconds = 0.0
        for number, epoch in enumerate(run["epochs"], start=1):
            seconds += epoch["seconds"]
            # (None without held-out samples.)
            if (epoch["test_accuracy"] or 0) >= record["config"]["target"]:
                pairs.append((number, seconds))
                break
        else:
            return None
    return pairs or None


def times_faster(record: Record, contender: str, other: str | None) -> list[float]:
    """The other's epoch / this one's, repeat by repeat: above 1 this one is faster."""
    return ratios(epoch_times(record, other or ""), epoch_times(record, contender))


def headline(record: Record) -> str:
    """The model, data, settings and hardware of a record, in a line."""
    config = record["config"]
    main = record["settings"][0]
    hardware = record["hardware"]
    cores = f"{format_count(hardware['cores'], 'core')} of {hardware['cpu']}"
    return (
        f"{config['model']} on {config['dataset']}: {main['train_size']} samples, global batch "
        f"{main['batch_size']}, {main['epochs']} epochs, world size {main['world_size']}, lr "
        f"{config.get('lr') or 'by default'}; {', '.join(hardware['gpus']) or cores}"
    )


def scoreboard(record: Record, recorded: bool = False) -> Table:
    """A row per contender in the main setting, which says so if it was ``recorded`` elsewhere."""
    mark = " (recorded)" if recorded else ""
    rows = [_cells(record, contender, mark) for contender in present(record).values()]
    if not rows:
        return Table(("contender",), ())
    columns = {}
    for head in rows[0]:
        cells = [row[head] for row in rows]
        # A column in which nobody has a value is left out, such as the ratio to PyTorch's.
        if set(cells) != {"-"}:
            columns[head] = cells
    return Table(tuple(columns), tuple(zip(*columns.values())))


def report(record: Record) -> str:
    """The tables that the command prints."""
    parts = [f"{headline(record)}\n{_RULES}", str(scoreboard(record))]
    for row in record["skipped"]:
        outcome = "failed" if row["failed"] else "not run"
        ranks = format_count(row["world_size"], "rank")
        parts.append(f"{outcome}: {row['contender']} on {ranks}: {row['reason']}")
    notes = {run["contender"]: run["note"] for run in record["runs"] if run.get("note")}
    parts += [f"{name}: {note}" for name, note in notes.items()]
    return "\n\n".join(parts)


def _cells(record: Record, contender: dict, mark: str) -> dict[str, str]:
    """The cells of a contender by their column's head; "-" where there is nothing to say."""
    name = contender["name"]
    runs = runs_of(record, name)
    accuracies = [run["epochs"][-1]["test_accuracy"] for run in runs]
    accuracy = epochs = seconds = "-"
    if None not in accuracies:
        accuracy = f"{statistics.median(accuracies):.1%}"
        epochs = seconds = "not reached"
        pairs = reached(record, name)
        if pairs:
            epochs = format_number(statistics.median(pair[0] for pair in pairs))
            seconds = format_seconds(statistics.median(pair[1] for pair in pairs))
    replicas = "equal"
    if not all(run["replicas_agree"] for run in runs):
        replicas = "DIFFERENT"
    target = f"{record['config']['target']:.0%}"
    sent = [max(run["bytes_sent"]) for run in runs if run["bytes_sent"]]
    torchs_ratios = times_faster(record, name, contender["counterpart"])
    return {
        "contender": name + mark,
        "epoch": _spread(epoch_times(record, name), format_seconds),
        "one device's / its": _spread(times_faster(record, name, SINGLE), format_number),
        "PyTorch's / ours": _spread(torchs_ratios, format_number),
        f"epochs to {target}": epochs,
        f"time to {target}": seconds,
        "accuracy": accuracy,
        "from one device": _largest_difference(runs),
        "replicas": replicas,
        "sent per rank": _spread(sent, format_bytes),
        "peak memory": _peak_memory(runs),
    }


def _largest_difference(runs: list[dict]) -> str:
    if any("difference_from_single" not in run for run in runs):
        return "-"
    differences = [run["difference_from_single"] for run in runs]
    # JSON has no NaN: in a run whose parameters diverged, null is stored instead.
    return "not finite" if None in differences else f"{max(differences):.1g}"


def _peak_memory(runs: list[dict]) -> str:
    """The median over runs of the rank, or the GPU, that took most."""
    peaks = []
    for run in runs:
        num_bytes: list[int] = []
        for rank in filter(None, run.get("peak_memory", ())):
            num_bytes += PeakMemory(**rank).by_device.values()
        if num_bytes:
            peaks.append(max(num_bytes))
    return format_bytes(statistics.median(peaks)) if peaks else "-"


def _spread(repeats: Sequence[float], text: Callable[[float], str]) -> str:
    if len(set(repeats)) > 1:
        return Spread.of(repeats).text(text)
    return text(repeats[0]) if repeats else "-"
