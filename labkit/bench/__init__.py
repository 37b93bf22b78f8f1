"""``labkit bench``: speeds measured on this machine, in pairs, as ratios with their spread.

    launch        labkit.run against torch.multiprocessing.spawn
    all-reduce    our algorithms against gloo, NCCL and MPI; the cost model fitted and compared
    ddp           a step of our DDP, and of PyTorch's on the backend "labkit" and on others
    placement     the cuts of VGG16: hops by placement, and every single cut against the planner
    pipeline      a step of our pipelines, of PyTorch's, and of a split without a pipeline

Other programs move every time on a small machine by a factor of two. So whatever is compared is
run in turns within one run, and the ratio of the pairs is what counts.
"""

import glob
import inspect
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from labkit.bench import all_reduce_result, ddp, launch, pipeline, pipeline_result, placement
from labkit.bench.all_reduce import bench_all_reduce
from labkit.bench.ddp import bench_ddp
from labkit.bench.launch import Comparison, bench_launch, run_ours, run_spawned
from labkit.devices import hardware, versions
from labkit.files import check_writable, write_atomically, write_each

__all__ = [
    "BENCHES",
    "Comparison",
    "bench_all_reduce",
    "bench_ddp",
    "bench_launch",
    "main",
    "run_ours",
    "run_spawned",
]

# A bench takes options by name, and gives results that print themselves.
BENCHES: dict[str, Callable[..., Iterable]] = {
    "launch": bench_launch,
    "all-reduce": bench_all_reduce,
    "ddp": bench_ddp,
    "placement": placement.bench_placement,
    "pipeline": pipeline.bench_pipeline,
}
_RECORDS = {
    "launch": launch.record,
    "all-reduce": all_reduce_result.record,
    "ddp": ddp.record,
    "placement": placement.record,
    "pipeline": pipeline_result.record,
}
_FIGURES = {"all-reduce": all_reduce_result.draw, "placement": placement.draw}
_PICTURES = (".png", ".svg")


def main(
    names: list[str],
    json_path: str | None = None,
    figure_path: str | None = None,
    command: str = "",
    **settings: Any,
) -> int:
    """Run the benches of these names (all of them if none is given), print and record them.

    Args:
        names: out of ``BENCHES``.
        json_path: where to write one bench's figures, with hardware and versions.
        figure_path: where to write its figure.
        command: the command line, for the record.
        settings: arguments of the benches.

    Raises:
        ValueError: before anything runs, for options that are wrong or belong to another bench.
    """
    chosen = names or list(BENCHES)
    _check(chosen, settings, json_path, figure_path)
    # Each checks its settings when it is called, and runs when its results are asked for.
    runs = {name: BENCHES[name](**settings) for name in chosen}
    for name, results in runs.items():
        found = []
        for result in results:
            print(result, flush=True)
            found.append(result)
        write_each(
            partial(_write_record, name, command, settings, found, json_path),
            partial(_draw, name, found, figure_path),
        )
    return 0


def _write_record(
    name: str, command: str, settings: dict, found: list, json_path: str | None
) -> None:
    if json_path is None:
        return
    record = {
        "command": command,
        "config": _config(name, settings),
        **_RECORDS[name](found),
        "hardware": hardware(),
        "versions": versions(),
    }
    write_atomically(json_path, _dumped(record))


def _draw(name: str, found: list, figure_path: str | None) -> None:
    if figure_path is None:
        return
    for path in _FIGURES[name](found, Path(figure_path)):
        print(f"figure: {path}")


def _check(chosen: list[str], settings: dict, json_path, figure_path) -> None:
    """Raise ValueError for what does not go together."""
    for name in chosen:
        if name not in BENCHES:
            raise ValueError(f"unknown bench {name!r}: choose one of {', '.join(BENCHES)}")
        taken = inspect.signature(BENCHES[name]).parameters
        for setting in settings:
            if setting not in taken:
                raise ValueError(f"bench {name} has no option {_option_of(setting)}")
    paths = [path for path in (json_path, figure_path) if path is not None]
    if len(chosen) > 1 and paths:
        raise ValueError(f"--json and --figure are of one bench: name {' or '.join(chosen)}")
    if figure_path is not None:
        _check_figure(chosen[0], Path(figure_path))
    # Some draw several figures: --json a_2_ranks.png could be one of those of --figure a.png.
    if json_path is not None and Path(json_path).suffix in _PICTURES:
        raise ValueError(f"--json {json_path}: a record is no figure, name a .json file")


def _check_figure(name: str, path: Path) -> None:
    if name not in _FIGURES:
        raise ValueError(f"bench {name} draws no figure: {', '.join(_FIGURES)} do")
    if path.suffix not in _PICTURES:
        raise ValueError(f"cannot draw {path}: a figure is saved as .png or .svg")
    for old in path.parent.glob(f"{glob.escape(path.stem)}_*{path.suffix}"):
        check_writable(old)


def _option_of(setting: str) -> str:
    names = {"world_sizes": "world-size", "sizes_bytes": "sizes"}
    return f"--{names.get(setting, setting)}"


def _dumped(record: dict) -> str:
    """JSON with a list of numbers on one line: there are many repeats."""
    text = json.dumps(record, indent=2) + "\n"
    return re.sub(r"\[[\d\s.,e+-]+\]", lambda found: " ".join(found[0].split()), text)


def _config(name: str, settings: dict) -> dict:
    """Every argument of the bench, defaults too."""
    parameters = inspect.signature(BENCHES[name]).parameters.values()
    return {p.name: settings.get(p.name, p.default) for p in parameters}
