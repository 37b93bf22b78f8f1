"""The command ``labkit compare``: run or read a record, print its tables, write its figures."""

import csv
import io
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from labkit.files import check_writable, write_atomically
from workbook.measure.compare.figures import draw
from workbook.measure.compare.measure import compare
from workbook.measure.compare.summary import load, report, rows
from workbook.measure.record import write


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
    for folder in filter(None, (figures_dir, csv_dir)):
        check_writable(Path(folder, "compare"))
    if from_path is None:
        record: dict[str, Any] = {"command": shlex.join(["labkit", *words])}
        record |= compare(**settings, say=partial(print, flush=True))
    elif settings:
        raise ValueError(f"--from draws what was recorded: drop {', '.join(settings)}")
    else:
        record = load(from_path)
    print(report(record))
    figures = {} if figures_dir is None else draw(record)
    paths = {f"{figures_dir}/compare_{name}.png": figure for name, figure in figures.items()}
    write(record, json_path, paths)
    for name, table in rows(record).items() if csv_dir is not None else ():
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in table for key in row)))
        writer.writeheader()
        writer.writerows(table)
        write_atomically(f"{csv_dir}/compare_{name}.csv", text.getvalue())
    return int(any(row["failed"] for row in record["skipped"]))
