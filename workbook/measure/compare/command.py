"""The command ``labkit compare``: run a comparison, print its tables, write record and figures."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.files import check_writable
from workbook.measure.compare.figures import draw
from workbook.measure.compare.measure import compare
from workbook.measure.compare.summary import Record, report
from workbook.measure.record import write


def main(
    json_path: str | None = None,
    figures_dir: str | None = None,
    words: Sequence[str] = (),
    **settings: Any,
) -> int:
    """Run the comparison; print its tables, write the record and the figures.

    Figures go to an existing folder, ``compare_NAME.png`` each. ``words`` are the command line,
    for the record, and ``settings`` those arguments of ``compare`` that it gives.

    Returns:
        The exit status: 1 if a contender started and failed, else 0.

    Raises:
        ValueError, OSError: before anything runs, for settings or files that are impossible.
        OutputError: after the run, a file could not be written.
    """
    if figures_dir is not None:
        check_writable(Path(figures_dir, "compare"))
    record: Record = {"command": shlex.join(["labkit", *words])} | compare(**settings)
    print(report(record))
    figures = {} if figures_dir is None else draw(record)
    paths = {f"{figures_dir}/compare_{name}.png": figure for name, figure in figures.items()}
    write(record, json_path, paths)
    return int(any(row["failed"] for row in record["skipped"]))
