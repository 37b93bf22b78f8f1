"""The command ``labkit bench``: run the benches; print, record and draw their results."""

import inspect
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from labkit.units import check_choice
from workbook.measure.all_reduce import bench_all_reduce
from workbook.measure.checkpoint import bench_checkpoint
from workbook.measure.ddp import bench_ddp
from workbook.measure.launch import bench_launch
from workbook.measure.pipeline import bench_pipeline
from workbook.measure.placement import bench_placement
from workbook.measure.record import Result, machine, write

BENCHES: dict[str, Callable[..., Iterable[Result]]] = {
    "launch": bench_launch,
    "all-reduce": bench_all_reduce,
    "ddp": bench_ddp,
    "placement": bench_placement,
    "pipeline": bench_pipeline,
    "checkpoint": bench_checkpoint,
}
DRAWN = ("all-reduce", "placement")


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
    if len(chosen) > 1 and (json_path, figure_path) != (None, None):
        raise ValueError(f"--json and --figure are for one bench: name {' or '.join(chosen)}")
    where = {name: settings.pop(name) for name in ("device", "devices") if name in settings}
    for name in chosen:
        check_choice("bench", name, BENCHES)
        if unknown := settings.keys() - inspect.signature(BENCHES[name]).parameters.keys():
            raise ValueError(f"bench {name} has no {', '.join(unknown)}")
    if figure_path is not None:
        if chosen[0] not in DRAWN:
            raise ValueError(f"bench {chosen[0]} draws no figure: {', '.join(DRAWN)} do")
        if Path(figure_path).suffix not in (".png", ".svg"):
            raise ValueError(f"cannot draw {figure_path}: a figure is saved as .png or .svg")
    # A bench checks its settings when it is called, and runs when its results are iterated over.
    runs = {name: BENCHES[name](**settings, where=where) for name in chosen}
    for name, results in runs.items():
        options = inspect.signature(BENCHES[name]).parameters.values()
        config = {one.name: settings.get(one.name, one.default) for one in options}
        how = {"command": shlex.join(["labkit", *words]), "config": config | {"where": where}}
        show(results, how, json_path, figure_path)
    return 0


def show(
    results: Iterable[Result],
    how: dict[str, Any],
    json_path: str | None = None,
    figure_path: str | None = None,
) -> None:
    """Print each result as soon as it is there; then write all of them, and their figures.

    What is there is written also if the bench is stopped before its end. ``how`` is the record's
    first part: at least ``command`` and ``config``. Several figures go to ``FILE_NAME.png`` each.
    """
    found: list[Result] = []
    try:
        for result in results:
            print(result, flush=True)
            found.append(result)
    finally:
        rows = [row for result in found for row in result.rows()]
        draws = {name: draw for result in found for name, draw in result.figures.items()}
        figures = {}
        for name, draw in draws.items() if figure_path else ():
            path = Path(figure_path or "")
            path = path.with_stem(f"{path.stem}_{name}") if len(draws) > 1 else path
            figures[str(path)] = draw()
        if found:
            write(how | {"rows": rows} | machine(), json_path, figures)
