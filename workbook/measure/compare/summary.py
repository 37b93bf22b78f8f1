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

from labkit.comm.peak_memory import PeakMemory
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
    wanted = (contender, setting)
    return [run for run in record["runs"] if (run["contender"], run["setting"]) == wanted]


def epoch_times(record: Record, contender: str, setting: int = 0) -> list[float]:
    """Seconds of an epoch, one number per repeat: the median of a run, warm-up left out."""
    runs = [[e["seconds"] for e in run["epochs"]] for run in runs_of(record, contender, setting)]
    return [statistics.median(seconds[1:] or seconds) for seconds in runs]


def present(record: Record) -> dict[str, dict]:
    """The contenders that ran in the main setting, by name, in the record's order."""
    ran = {run["contender"] for run in record["runs"] if run["setting"] == 0}
    return {one["name"]: one for one in record["contenders"] if one["name"] in ran}


def reached(record: Record, contender: str) -> list[tuple[int, float]] | None:
    """(epochs, seconds) until the held-out accuracy is first the target, by repeat.

    None if any repeat never reached it.
    """
    found = []
    for run in runs_of(record, contender):
        seconds = 0.0
        for number, epoch in enumerate(run["epochs"], start=1):
            seconds += epoch["seconds"]
            # (None without held-out samples.)
            if (epoch["test_accuracy"] or 0) >= record["config"]["target"]:
                found.append((number, seconds))
                break
        else:
            return None
    return found or None


def series(record: Record, contender: str) -> dict[int, list[float]]:
    """Epoch times by the number of training samples, with all else as in the main setting."""
    main = record["settings"][0]
    times_by_size = {}
    for index, setting in enumerate(record["settings"]):
        times = epoch_times(record, contender, index)
        if times and all(setting[name] == main[name] for name in ("world_size", "batch_size")):
            times_by_size[setting["train_size"]] = times
    return dict(sorted(times_by_size.items()))


def times_faster(record: Record, contender: str, other: str | None) -> list[float]:
    """The other's epoch / this one's, repeat by repeat: above 1 this one is faster."""
    return ratios(epoch_times(record, other or ""), epoch_times(record, contender))


def gain(record: Record, contender: str, other: str) -> str:
    """Whether a contender gains on another with more training samples, in a sentence.

    It does if its epochs over the other's fall by more than the quartiles of the repeats overlap.
    """
    ours = series(record, contender)
    theirs = series(record, other)
    spreads = {size: Spread.of(ratios(ours[size], theirs[size])) for size in ours}
    parts = [f"{spread.text(format_number)} at {size:,}" for size, spread in spreads.items()]
    first, *_, last = spreads.values()
    verdict = "cannot tell whether"
    if last.high < first.low or last.low > first.high:
        verdict = "supports that" if last.median < first.median else "contradicts that"
    return (
        f"{contender}'s epoch / {other}'s: {', '.join(parts)} training samples. So the record "
        f"{verdict} {contender} gains on {other} with more training samples."
    )


def headline(record: Record) -> str:
    """What was measured, on what."""
    config, main, hardware = record["config"], record["settings"][0], record["hardware"]
    cores = f"{format_count(hardware['cores'], 'core')} of {hardware['cpu']}"
    return (
        f"{config['model']} on {config['dataset']}: {main['train_size']} samples, global batch "
        f"{main['batch_size']}, {main['epochs']} epochs, world size {main['world_size']}, lr "
        f"{config.get('lr') or 'by default'}; {', '.join(hardware['gpus']) or cores}"
    )


def scoreboard(record: Record, recorded: bool = False) -> Table:
    """A row per contender in the main setting, which says so if it was ``recorded`` elsewhere."""
    target, names = f"{record['config']['target']:.0%}", present(record)
    heads = ("contender", "epoch", "one device's / its", "PyTorch's / ours")
    heads += (f"epochs to {target}", f"time to {target}", "accuracy", "from one device")
    heads += ("replicas", "sent per rank", "peak memory")
    rows = [_row(record, one) for one in names.values()]
    mark = " (recorded)" if recorded else ""
    rows = [(name + mark, *cells) for name, *cells in rows]
    # PyTorch's, for example, may have been left out.
    columns = [column for column in zip(heads, *rows) if {*column[1:]} != {"-"}]
    heads, *rows = zip(*columns)
    return Table(heads, tuple(rows))


def report(record: Record) -> str:
    """The tables that the command prints."""
    parts = [f"{headline(record)}\n{_RULES}", str(scoreboard(record))]
    times = {name: series(record, name) for name in present(record)}
    sizes = sorted({size for by_size in times.values() for size in by_size})
    if len(sizes) > 1:
        rows = [
            (name, *(_spread(by_size.get(size, []), format_seconds) for size in sizes))
            for name, by_size in times.items()
        ]
        heads = ("epoch by training samples", *(f"{size:,}" for size in sizes))
        parts.append(str(Table(heads, tuple(rows))))
    for row in record["skipped"]:
        what = "failed" if row["failed"] else "not run"
        ranks = format_count(row["world_size"], "rank")
        parts.append(f"{what}: {row['contender']} on {ranks}: {row['reason']}")
    notes = {run["contender"]: run["note"] for run in record["runs"] if run.get("note")}
    return "\n\n".join([*parts, *(f"{name}: {note}" for name, note in notes.items())])


def _row(record: Record, contender: dict) -> tuple[str, ...]:
    name = contender["name"]
    runs, to_reach = runs_of(record, name), ["not reached"] * 2
    if times := reached(record, name):
        epochs, seconds = map(statistics.median, zip(*times))
        to_reach = [format_number(epochs), format_seconds(seconds)]
    far = [run.get("difference_from_single", "unknown") for run in runs]
    # JSON has no NaN: in a run whose parameters diverged, null is stored instead.
    apart = "not finite" if None in far else "-" if "unknown" in far else f"{max(far):.1g}"
    sent = [max(run["bytes_sent"]) for run in runs if run["bytes_sent"]]
    ranks = [[PeakMemory(**one) for one in run.get("peak_memory", ()) if one] for run in runs]
    peaks = [max(max(rank.by_device.values(), default=0) for rank in own) for own in ranks if own]
    accuracies = [run["epochs"][-1]["test_accuracy"] for run in runs]
    accuracy = "-"
    if None in accuracies:
        to_reach = ["-"] * 2
    else:
        accuracy = f"{statistics.median(accuracies):.1%}"
    return (
        name,
        _spread(epoch_times(record, name), format_seconds),
        _spread(times_faster(record, name, SINGLE), format_number),
        _spread(times_faster(record, name, contender["counterpart"]), format_number),
        *to_reach,
        accuracy,
        apart,
        "equal" if all(run["replicas_agree"] for run in runs) else "DIFFERENT",
        _spread(sent, format_bytes),
        format_bytes(statistics.median(peaks)) if peaks else "-",
    )


def _spread(repeats: Sequence[float], text: Callable[[float], str]) -> str:
    if len(set(repeats)) > 1:
        return Spread.of(repeats).text(text)
    return text(repeats[0]) if repeats else "-"
