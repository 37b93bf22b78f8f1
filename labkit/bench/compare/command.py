"""The command ``labkit compare``: run or read a record, print its tables, write its figures."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from labkit.bench.compare.figures import draw
from labkit.bench.compare.measure import compare
from labkit.bench.compare.schema import load
from labkit.bench.compare.summary import report
from labkit.bench.record import command_line, dumped, flag
from labkit.files import check_writable, write_atomically, write_each
from labkit.plots.figure import CaptionedFigure


def main(
    json_path: str | None = None,
    figures_dir: str | None = None,
    from_path: str | None = None,
    words: Sequence[str] = (),
    **options: Any,
) -> int:
    """Run, or read a record; print the tables, write the record and the figures.

    Args:
        json_path: where the record goes.
        figures_dir: an existing folder for the figures, ``compare_NAME.png`` each.
        from_path: a record to read instead of running.
        words: the command line, for the record.
        options: arguments of ``compare``; None was not given.

    Returns:
        1 if a contender started and failed, else 0.

    Raises:
        ValueError, OSError: before anything runs, what is impossible.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if figures_dir is not None:
        _check_figures(figures_dir)
    if json_path is not None and Path(json_path).suffix == ".png":
        raise ValueError(f"--json {json_path}: a record is not a figure, name a .json file")
    record = _run(given, words) if from_path is None else _read(from_path, given)
    print(report(record))
    writes: list[Callable[[], object]] = []
    if json_path is not None:
        writes.append(lambda: write_atomically(json_path, dumped(record)))
    if figures_dir is not None:
        for name, figure in draw(record).items():
            writes.append(partial(_save, figure, Path(figures_dir) / f"compare_{name}.png"))
    write_each(*writes)
    return int(any(row["failed"] for row in record["skipped"]))


def _run(given: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    return {"command": command_line(words)} | compare(**given, say=partial(print, flush=True))


def _read(path: str, given: dict[str, Any]) -> dict[str, Any]:
    if given:
        drop = ", ".join(map(flag, given))
        raise ValueError(f"--from draws what was recorded, and cannot change it: drop {drop}")
    return load(path)


def _check_figures(folder: str) -> None:
    if not (folder and os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise ValueError(
            f"cannot write figures to {folder!r}: give a folder that exists and can be written"
        )
    for old in Path(folder).glob("compare_*.png"):
        check_writable(old)


def _save(figure: CaptionedFigure, path: Path) -> None:
    print(f"figure: {figure.save(path)}")
