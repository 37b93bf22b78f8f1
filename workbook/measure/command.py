"""The command ``labkit bench``: run the benches; print, record and draw their results."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit.engine.devices import check_world_size, plan
from labkit.units import check_choice, check_integer
from labkit.workload.models import MODELS
from workbook.measure.all_reduce import SIZES_BYTES, bench_all_reduce
from workbook.measure.benches import bench_steps, ddp, pipeline
from workbook.measure.record import Result, machine, write
from workbook.measure.turns import DeviceOptions

# Name -> the options of a bench with their defaults.
BENCHES: dict[str, dict[str, Any]] = {
    "all-reduce": {"world_sizes": (2, 4), "sizes_bytes": SIZES_BYTES, "repeats": 30},
    "ddp": {"world_sizes": (2,), "models": ("small_cnn", "resnet18", "vgg16"), "repeats": 20},
    "pipeline": {"world_sizes": (2,), "models": ("vgg16", "resnet18"), "repeats": 10},
}


def main(
    names: Sequence[str],
    json_path: str | None = None,
    figure_path: str | None = None,
    words: Sequence[str] = (),
    device: str = "auto",
    devices: Sequence[str] | None = None,
    **settings: Any,
) -> int:
    """Run the benches of these names (all of them if none is given); print and record them.

    One bench's results go to ``json_path``, with hardware, versions and the command's ``words``.
    ``settings`` are those options of the benches that the command line gives, ``device`` and
    ``devices`` say where ranks run. Returns the exit status.

    Raises:
        ValueError: before anything runs, for options that are wrong or belong to another bench.
        OutputError: after the runs, a file could not be written.
    """
    names = names or list(BENCHES)
    if len(names) > 1 and (json_path or figure_path):
        raise ValueError(f"--json and --figure are for one bench: name {' or '.join(names)}")
    if figure_path and names[0] != "all-reduce":
        raise ValueError(f"bench {names[0]} has no figure: leave --figure out")
    if figure_path and Path(figure_path).suffix not in (".png", ".svg"):
        raise ValueError(f"cannot draw {figure_path}: a figure is saved as .png or .svg")
    device_options = {"device": device, "devices": devices}
    configs = {}
    for name in names:
        check_choice("bench", name, BENCHES)
        unknown = settings.keys() - BENCHES[name].keys()
        if unknown:
            raise ValueError(f"bench {name} has no {', '.join(unknown)}")
        configs[name] = BENCHES[name] | settings
        check(configs[name], device_options)
    for name, config in configs.items():
        command = shlex.join(["labkit", *words])
        record = {"command": command, "config": config | device_options}
        show(results(name, config, device_options), record, json_path, figure_path)
    return 0


def check(config: dict[str, Any], device_options: DeviceOptions) -> None:
    """Raise ValueError for settings with which no bench could run."""
    check_integer("repeats", config["repeats"])
    for world_size in config["world_sizes"]:
        check_integer("the world size of a bench", world_size, least=2)
        check_world_size(world_size)
        plan(world_size, **device_options)
    for model in config.get("models", ()):
        check_choice("model", model, MODELS)
    for size in config.get("sizes_bytes", ()):
        if size < 4 or size % 4:
            raise ValueError(f"{size} bytes do not divide into float32: give a multiple of 4")


def results(name: str, config: dict[str, Any], device_options: DeviceOptions) -> Iterator[Result]:
    """The results of a bench, one number of ranks and one model after the other."""
    repeats = config["repeats"]
    for world_size in config["world_sizes"]:
        if name == "all-reduce":
            yield bench_all_reduce(world_size, config["sizes_bytes"], repeats, device_options)
            continue
        contenders = {"ddp": ddp, "pipeline": pipeline}[name]
        for model in config["models"]:
            yield bench_steps(contenders, world_size, model, repeats, device_options)


def show(
    results: Iterable[Result],
    record: dict[str, Any],
    json_path: str | None = None,
    figure_path: str | None = None,
) -> None:
    """Print each result as soon as it is there; then write all of them, and their figures.

    What is there is written also if the bench is stopped before its end. ``record`` is the
    record's first part: at least ``command`` and ``config``. Several figures go to
    ``FILE_NAME.png`` each.
    """
    rows = []
    draw_by_name = {}
    try:
        for result in results:
            print(result, flush=True)
            rows += result.rows()
            draw_by_name.update(result.figures)
    finally:
        figures = {}
        if figure_path:
            for name, draw in draw_by_name.items():
                path = Path(figure_path)
                if len(draw_by_name) > 1:
                    path = path.with_stem(f"{path.stem}_{name}")
                figures[str(path)] = draw()
        if rows:
            write(record | {"rows": rows} | machine(), json_path, figures)
