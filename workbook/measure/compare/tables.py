"""The numbers of a record as tables, one CSV file each: for spreadsheets, and for other figures.

Every row names its contender and setting. What was not measured is left empty.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.files import check_writable, write_atomically, write_each
from workbook.measure.compare.summary import Record, epoch_seconds, to_target

Row = dict[str, Any]
_NUMBERS = ("loss", "train_accuracy", "test_accuracy", "test_loss", "test_top5")


def tables(record: Record) -> dict[str, list[Row]]:
    """``{name: rows}``: a table for each kind of measurement that the record has."""
    rows = {
        "epochs": list(_epochs(record)),
        "phases": list(_phases(record)),
        "times": list(_times(record)),
        "time_to_accuracy": list(_to_accuracy(record)),
        "loading": list(_loading(record)),
    }
    return {name: table for name, table in rows.items() if table}


def csv_paths(folder: str) -> dict[str, str]:
    """The path of each table in a folder.

    Raises:
        ValueError: the folder does not exist, or one of the files cannot be written.
    """
    if not (folder and Path(folder).is_dir()):
        raise ValueError(f"cannot write tables to {folder!r}: give a folder that exists")
    names = ("epochs", "phases", "times", "time_to_accuracy", "loading")
    paths = {name: f"{folder}/compare_{name}.csv" for name in names}
    for path in paths.values():
        check_writable(path)
    return paths


def write_tables(record: Record, folder: str) -> list[str]:
    """Write ``compare_NAME.csv`` for each table; returns their paths.

    Raises:
        ValueError: as ``csv_paths``.
        OutputError: one or more could not be written; the message names all of them.
    """
    paths, found = csv_paths(folder), tables(record)
    texts = {paths[name]: as_csv(rows) for name, rows in found.items()}
    write_each(*(lambda p=path, t=text: write_atomically(p, t) for path, text in texts.items()))
    return list(texts)


def as_csv(rows: list[Row]) -> str:
    """Rows as CSV, with a column for each name that any of them has."""
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _runs(record: Record) -> Iterator[tuple[Row, dict]]:
    """Every run, with what names it."""
    whose = {
        one["name"]: "PyTorch" if one["builtin"] else "labkit" for one in record["contenders"]
    }
    for run in record["runs"]:
        setting = dict(record["settings"][run["setting"]])
        setting.pop("epochs")
        name = {"contender": run["contender"], "by": whose[run["contender"]]}
        yield name | setting | {"repeat": run["repeat"] + 1}, run


def _epochs(record: Record) -> Iterator[Row]:
    for name, run in _runs(record):
        passed_s = 0.0
        for number, epoch in enumerate(run["epochs"], start=1):
            passed_s += epoch["seconds"]
            numbers = {key: epoch.get(key) for key in _NUMBERS}
            at = {"epoch": number, "seconds": epoch["seconds"], "passed_s": round(passed_s, 6)}
            yield name | at | numbers


def _phases(record: Record) -> Iterator[Row]:
    for name, run in _runs(record):
        for role, epochs in run.get("epoch_phases_s", {}).items():
            for number, kinds in enumerate(epochs, start=1):
                for kind, seconds in kinds.items():
                    row = {"epoch": number, "role": role, "kind": kind, "seconds": seconds}
                    yield name | row


def _times(record: Record) -> Iterator[Row]:
    """An epoch's time by ranks, samples and batch, and as a part of one device's in its turn."""
    alone = {}
    for name, run in _runs(record):
        if run["contender"] == "single":
            alone[_like(name)] = epoch_seconds(run)
    for name, run in _runs(record):
        seconds = epoch_seconds(run)
        one = alone.get(_like(name))
        yield name | {
            "epoch_s": round(seconds, 9),
            "single_s / epoch_s": one and round(one / seconds, 4),
        }


def _like(name: Row) -> tuple:
    return name["train_size"], name["batch_size"], name["repeat"]


def _to_accuracy(record: Record) -> Iterator[Row]:
    target = record["config"]["target"]
    for name, run in _runs(record):
        if run["setting"] == 0:
            epochs, seconds = to_target(run, target) or (None, None)
            yield name | {
                "target": target,
                "epochs": epochs,
                "seconds": seconds and round(seconds, 6),
            }


def _loading(record: Record) -> Iterator[Row]:
    for row in record.get("loading", ()):
        for number, seconds in enumerate(row["seconds"], start=1):
            yield {"train_size": row["train_size"], "repeat": number, "seconds": seconds}
