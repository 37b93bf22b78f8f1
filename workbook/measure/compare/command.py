"""The command ``labkit compare``: run or read a record, print its tables, write its figures."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from labkit.files import check_writable, write_atomically
from workbook.measure.compare.figures import draw
from workbook.measure.compare.measure import compare
from workbook.measure.compare.summary import csv_tables, load, report
from workbook.measure.record import command_line, flag, write


def main(
    json_path: str | None = None,
    figures_dir: str | None = None,
    csv_dir: str | None = None,
    from_path: str | None = None,
    words: Sequence[str] = (),
    **settings: Any,
) -> int:
    """Run the comparison, or read a record; print its tables, write the record and the figures.

    Args:
        json_path: where to write the record.
        figures_dir: an existing folder for the figures, ``compare_NAME.png`` each.
        csv_dir: an existing folder for the tables, ``compare_NAME.csv`` each.
        from_path: a record to read, instead of running the comparison.
        words: the command line, for the record.
        settings: those arguments of ``compare`` that the command line gives.

    Returns:
        The exit status: 1 if a contender started and failed, else 0.

    Raises:
        ValueError, OSError: before anything runs, for settings or files that are impossible.
        OutputError: after the run, a file could not be written.
    """
    for folder, ending in ((figures_dir, "png"), (csv_dir, "csv")):
        if folder is None:
            continue
        if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
            raise ValueError(f"cannot write to {folder!r}: give a folder that exists")
        for old in Path(folder).glob(f"compare_*.{ending}"):
            check_writable(old)
    if json_path is not None and Path(json_path).suffix == ".png":
        raise ValueError(f"--json {json_path}: a record is not a figure, name a .json file")
    record: dict[str, Any]
    if from_path is None:
        record = {"command": command_line(words)}
        record |= compare(**settings, say=partial(print, flush=True))
    elif settings:
        drop = ", ".join(map(flag, settings))
        raise ValueError(f"--from draws what was recorded, and cannot change it: drop {drop}")
    else:
        record = load(from_path)
    print(report(record))
    figures = {} if figures_dir is None else draw(record)
    paths = {f"{figures_dir}/compare_{name}.png": figure for name, figure in figures.items()}
    tables = {} if csv_dir is None else csv_tables(record)
    write(record, json_path, paths)
    for name, table in tables.items():
        write_atomically(f"{csv_dir}/compare_{name}.csv", table)
    return int(any(row["failed"] for row in record["skipped"]))
