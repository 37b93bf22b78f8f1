"""The command ``labkit bench``: run the benches; print, record and draw their results."""

import glob
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from labkit.files import check_writable
from labkit.units import check_choice
from workbook.measure.all_reduce import bench_all_reduce
from workbook.measure.checkpoint import bench_checkpoint
from workbook.measure.ddp import bench_ddp
from workbook.measure.launch import bench_launch
from workbook.measure.pipeline import bench_pipeline
from workbook.measure.placement import bench_placement
from workbook.measure.record import Result, command_line, flag, machine, write

BENCHES: dict[str, Callable[..., Iterable[Result]]] = {
    "launch": bench_launch,
    "all-reduce": bench_all_reduce,
    "ddp": bench_ddp,
    "placement": bench_placement,
    "pipeline": bench_pipeline,
    "checkpoint": bench_checkpoint,
}
DRAWN = ("all-reduce", "placement")
_PICTURES = (".png", ".svg")


def main(
    names: Sequence[str],
    json_path: str | None = None,
    figure_path: str | None = None,
    words: Sequence[str] = (),
    **settings: Any,
) -> int:
    """Run the benches of these names (all of them if none is given); print and record them.

    Args:
        names: out of ``BENCHES``; if empty, all.
        json_path: where to write one bench's results, with hardware and versions.
        figure_path: where to write its figures.
        words: the command line, for the record.
        settings: those arguments of the benches that the command line gives.

    Returns:
        0, the exit status.

    Raises:
        ValueError: before anything runs, for options that are wrong or belong to another bench.
        OutputError: after the runs, a file could not be written.
    """
    chosen = names or list(BENCHES)
    _check(chosen, settings, json_path, figure_path)
    # A bench checks its settings when it is called, and runs when its results are iterated over.
    runs = {name: BENCHES[name](**settings) for name in chosen}
    for name, results in runs.items():
        parameters = inspect.signature(BENCHES[name]).parameters.values()
        options = [one for one in parameters if one.kind is not one.KEYWORD_ONLY]
        config = {one.name: settings.get(one.name, one.default) for one in options}
        show(results, {"command": command_line(words), "config": config}, json_path, figure_path)
    return 0


def show(
    results: Iterable[Result],
    how: dict[str, Any],
    json_path: str | None = None,
    figure_path: str | None = None,
) -> None:
    """Print each result as soon as it is there; then write all of them, and their figures.

    What is there is written also if the bench is stopped before its end. ``how`` is the record's
    first part: at least ``command`` and ``config``.
    """
    found: list[Result] = []
    try:
        for result in results:
            print(result, flush=True)
            found.append(result)
    finally:
        if found:
            rows = [row for result in found for row in result.rows()]
            record = {} if json_path is None else how | {"rows": rows} | machine()
            write(record, json_path, {} if figure_path is None else _figures(found, figure_path))


def _figures(found: list[Result], figure_path: str) -> dict[str, Any]:
    """One figure goes to ``FILE.png``; several to ``FILE_NAME.png`` each."""
    draws = {name: draw for result in found for name, draw in result.figures.items()}
    path = Path(figure_path)
    return {
        str(path.with_stem(f"{path.stem}_{name}") if len(draws) > 1 else path): draw()
        for name, draw in draws.items()
    }


def _check(
    chosen: Sequence[str], settings: dict[str, Any], json_path: str | None, figure_path: str | None
) -> None:
    """Raise ValueError for options that do not fit the bench or each other."""
    for name in chosen:
        check_choice("bench", name, BENCHES)
        for setting in settings:
            if setting not in inspect.signature(BENCHES[name]).parameters:
                raise ValueError(f"bench {name} has no option {flag(setting)}")
    if len(chosen) > 1 and (json_path, figure_path) != (None, None):
        raise ValueError(f"--json and --figure are for one bench: name {' or '.join(chosen)}")
    # --figure a.png may write several files, and a_2_ranks.png could be one of them.
    if json_path is not None and Path(json_path).suffix in _PICTURES:
        raise ValueError(f"--json {json_path}: a record is not a figure, name a .json file")
    if figure_path is not None:
        path = Path(figure_path)
        if chosen[0] not in DRAWN:
            raise ValueError(f"bench {chosen[0]} draws no figure: {', '.join(DRAWN)} do")
        if path.suffix not in _PICTURES:
            raise ValueError(f"cannot draw {path}: a figure is saved as .png or .svg")
        for old in path.parent.glob(f"{glob.escape(path.stem)}_*{path.suffix}"):
            check_writable(old)
