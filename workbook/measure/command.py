"""The command ``labkit bench``: run the benches; print, record and draw their results."""

import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from labkit.devices import check_world_size, plan
from labkit.units import check_choice, check_integer
from labkit.workload.models import MODELS
from workbook.measure.all_reduce import SIZES_BYTES, bench_all_reduce
from workbook.measure.benches import bench_steps, ddp, pipeline, sharded, tensor_parallel
from workbook.measure.placement import bench_placement
from workbook.measure.record import Result, machine, write
from workbook.measure.turns import Where

# Name -> what runs it, on one number of ranks and one model, and its options with their defaults.
BENCHES: dict[str, tuple[Callable[..., Iterable[Result]], dict[str, Any]]] = {
    "all-reduce": (
        bench_all_reduce,
        {"world_sizes": (2, 4), "sizes_bytes": SIZES_BYTES, "repeats": 30, "figure_path": None},
    ),
    "ddp": (
        partial(bench_steps, ddp),
        {"world_sizes": (2,), "models": ("small_cnn", "resnet18", "vgg16"), "repeats": 20},
    ),
    "sharded": (
        partial(bench_steps, sharded),
        {"world_sizes": (2,), "models": ("gpt",), "repeats": 20},
    ),
    "tensor-parallel": (
        partial(bench_steps, tensor_parallel),
        {"world_sizes": (2,), "models": ("gpt",), "repeats": 20},
    ),
    "placement": (bench_placement, {"repeats": 6}),
    "pipeline": (
        partial(bench_steps, pipeline),
        {"world_sizes": (2,), "models": ("vgg16", "resnet18"), "repeats": 10},
    ),
}


def main(
    names: Sequence[str], json_path: str | None = None, words: Sequence[str] = (), **settings: Any
) -> int:
    """Run the benches of these names (all of them if none is given); print and record them.

    One bench's results go to ``json_path``, with hardware, versions and the command's ``words``.
    ``settings`` are those options of the benches that the command line gives, and where ranks run.
    Returns the exit status.

    Raises:
        ValueError: before anything runs, for options that are wrong or belong to another bench.
        OutputError: after the runs, a file could not be written.
    """
    chosen = names or list(BENCHES)
    if len(chosen) > 1 and (json_path or settings.get("figure_path")):
        raise ValueError(f"--json and --figure are for one bench: name {' or '.join(chosen)}")
    where = {name: settings.pop(name) for name in ("device", "devices") if name in settings}
    for name in chosen:
        check_choice("bench", name, BENCHES)
        options = BENCHES[name][1]
        if unknown := settings.keys() - options:
            raise ValueError(f"bench {name} has no {', '.join(unknown)}")
        check(options | settings, where)
    for name in chosen:
        bench, options = BENCHES[name]
        config = options | settings
        how = {"command": shlex.join(["labkit", *words]), "config": config | {"where": where}}
        figure_path = config.pop("figure_path", None)
        show(results(bench, config, where), how, json_path, figure_path)
    return 0


def check(config: dict[str, Any], where: Where) -> None:
    """Raise ValueError for settings with which no bench could run."""
    check_integer("repeats", config["repeats"])
    for world_size in config.get("world_sizes", (2,)):
        check_integer("the world size of a bench", world_size, least=2)
        check_world_size(world_size)
        plan(world_size, **where)
    for model in config.get("models", ()):
        check_choice("model", model, MODELS)
    for size in config.get("sizes_bytes", ()):
        if size < 4 or size % 4:
            raise ValueError(f"{size} bytes do not divide into float32: give a multiple of 4")
    figure_path = config.get("figure_path")
    if figure_path and Path(figure_path).suffix not in (".png", ".svg"):
        raise ValueError(f"cannot draw {figure_path}: a figure is saved as .png or .svg")


def results(
    bench: Callable[..., Iterable[Result]], config: dict[str, Any], where: Where
) -> Iterator[Result]:
    """The results of a bench, one number of ranks and one model after the other."""
    varied = {"world_sizes": "world_size", "models": "model"}
    each = [[(varied[key], one) for one in config[key]] for key in varied if key in config]
    rest = {key: value for key, value in config.items() if key not in varied}
    for one in itertools.product(*each):
        yield from bench(**dict(one), **rest, where=where)


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
        path, figures = Path(figure_path or ""), {}
        for name, draw in draws.items() if figure_path else ():
            place = path.with_stem(f"{path.stem}_{name}") if len(draws) > 1 else path
            figures[str(place)] = draw()
        if found:
            write(how | {"rows": rows} | machine(), json_path, figures)
