"""``labkit compare``: all techniques and PyTorch's own, like for like, on this machine.

Everybody gets the same model, data, global batch, order of samples, seed and number of steps, on
the same loop (``labkit.training.loop.fit``); contenders take turns. What comes out is one record,
and all tables and figures are drawn from it, now or later.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from labkit import devices
from labkit.bench.compare import figures, summary
from labkit.bench.compare.contenders import Contender, find_contenders
from labkit.bench.compare.measure import Comparison, Setting, settings_of
from labkit.bench.compare.record import load
from labkit.config import RunConfig
from labkit.files import check_writable, write_atomically, write_each
from labkit.plots.figure import CaptionedFigure
from labkit.runtime.preload import warm_up
from labkit.units import (
    MOST_SECONDS,
    check_above_zero,
    check_integer,
)
from labkit.workload.datasets import DATASETS, load_dataset
from labkit.workload.models import MODELS

__all__ = [
    "Contender",
    "Setting",
    "compare",
    "figures",
    "find_contenders",
    "load",
    "main",
    "summary",
]

# Leaves room below ten minutes for a setting that takes longer than the last time.
BUDGET_S = 480.0
_WORLD_SIZES = (1, 2, 3, 4)
_BATCH_SIZES = (64, 128, 256)
_EPOCHS = 6
_TARGET = 0.95


def compare(
    strategies: tuple[str, ...] = (),
    world_sizes: tuple[int, ...] = _WORLD_SIZES,
    train_sizes: tuple[int, ...] = (),
    batch_sizes: tuple[int, ...] = _BATCH_SIZES,
    repeats: int | None = None,
    epochs: int = _EPOCHS,
    target: float = _TARGET,
    model: str = "small_cnn",
    dataset: str = "digits",
    device: str = "auto",
    budget_s: float = BUDGET_S,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run the comparison and return its record.

    Args:
        strategies: techniques out of ``labkit.strategies.STRATEGIES``, by default all that share
            out the batch; PyTorch's counterparts and ``single`` take part anyway.
        world_sizes, train_sizes, batch_sizes: what to vary, one at a time, see ``settings_of``.
            Train sizes are by default a quarter, a half and all of the data.
        repeats: of everything; None takes as many as fit into ``budget_s``, 1 to 5.
        epochs: of the main setting.
        target: held-out accuracy, 0 to 1.
        model, dataset, device: as in ``RunConfig``.
        budget_s: the time for all of it.
        say: takes a line of progress.

    Raises:
        ValueError: unknown names, numbers that cannot be.
        FileNotFoundError: the data set is not there.
    """
    _check(model, dataset, target)
    _check_numbers(world_sizes, train_sizes, batch_sizes, repeats, epochs, budget_s)
    taking_part = find_contenders(strategies, device)
    sizes = train_sizes or _parts_of(len(load_dataset(dataset).train_targets))
    load_dataset(dataset, train_size=max(sizes))
    gpus = len(set(devices.plan(max(world_sizes), device).devices) - {"cpu"})
    units = gpus or devices.num_cores()
    settings = settings_of(world_sizes, sizes, batch_sizes, epochs, units)
    defaults = RunConfig()
    common = {"model": model, "dataset": dataset, "device": device, "seed": defaults.seed}
    for setting in settings:
        RunConfig(**common, **asdict(setting))
    warm_up()
    say(f"{len(taking_part)} contenders: {', '.join(one.name for one in taking_part)}")
    comparison = Comparison(taking_part, settings, common, say)
    comparison.run(repeats, budget_s)
    rates = {"lr": defaults.lr, "momentum": defaults.momentum}
    return {
        "config": common | rates | {"target": target, "repeats": repeats, "gpus_used": gpus},
        "contenders": [asdict(one) for one in taking_part],
        "settings": [asdict(setting) for setting in settings],
        "runs": comparison.runs,
        "skipped": comparison.skipped,
        "hardware": devices.hardware(),
        "versions": devices.versions(),
    }


def main(
    json_path: str | None = None,
    figures_dir: str | None = None,
    from_path: str | None = None,
    command: str = "",
    **settings: Any,
) -> int:
    """The command: run, or read a record; print the tables, write the record and the figures.

    Args:
        json_path: where the record goes.
        figures_dir: an existing folder for the figures, ``compare_NAME.png`` each.
        from_path: a record to take instead of running.
        command: the command line, for the record.
        settings: arguments of ``compare``.

    Returns:
        1 if a contender began and broke off, else 0.

    Raises:
        ValueError, OSError: before anything runs, what cannot be.
    """
    if figures_dir is not None:
        _check_figures(figures_dir)
    if json_path is not None and Path(json_path).suffix == ".png":
        raise ValueError(f"--json {json_path}: a record is no figure, name a .json file")
    if from_path is not None and settings:
        options = ", ".join(map(_option, settings))
        raise ValueError(f"--from draws what was recorded, and cannot change it: drop {options}")
    if from_path is not None:
        record = load(from_path)
    else:
        record = {"command": command} | compare(**settings, say=_say)
    print(summary.report(record))
    writes = []
    if json_path is not None:
        writes.append(lambda: write_atomically(json_path, _dumped(record)))
    if figures_dir is not None:
        writes += [
            partial(_save, figure, Path(figures_dir) / f"compare_{name}.png")
            for name, figure in figures.draw(record).items()
        ]
    write_each(*writes)
    return int(any(row["failed"] for row in record["skipped"]))


def _check_figures(folder: str) -> None:
    if not (folder and os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise ValueError(
            f"cannot write figures to {folder!r}: give a folder that exists and can be written"
        )
    for old in Path(folder).glob("compare_*.png"):
        check_writable(old)


def _save(figure: CaptionedFigure, path: Path) -> None:
    print(f"figure: {figure.save(path)}")


def _option(name: str) -> str:
    return f"--{name.replace('sizes', 'size').replace('_', '-')}"


def _check(model: str, dataset: str, target: float) -> None:
    for kind, name, known in (("model", model, MODELS), ("data set", dataset, DATASETS)):
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}: choose one of {', '.join(known)}")
    check_above_zero("the target, an accuracy,", target, 1)


def _check_numbers(world_sizes, train_sizes, batch_sizes, repeats, epochs, budget_s) -> None:
    """What ``RunConfig`` would find too late: the settings are made from these."""
    for world_size in world_sizes:
        devices.check_world_size(world_size)
    for name, sizes in (("train_size", train_sizes), ("batch_size", batch_sizes)):
        for size in sizes:
            check_integer(name, size)
    for name, sizes in (("world_sizes", world_sizes), ("batch_sizes", batch_sizes)):
        if not sizes:
            raise ValueError(f"{name} is empty: name at least one")
    check_integer("epochs", epochs)
    if repeats is not None:
        check_integer("repeats", repeats)
    check_above_zero("budget_s", budget_s, MOST_SECONDS)


def _parts_of(samples: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, samples // 4), max(1, samples // 2), samples}))


def _say(line: str) -> None:
    print(line, flush=True)


def _dumped(record: dict) -> str:
    """JSON, each run and each other row on a line of its own."""
    rows = ("contenders", "settings", "runs", "skipped")
    head = {key: value for key, value in record.items() if key not in rows}
    text = json.dumps(head, indent=2).removesuffix("\n}")
    for key in rows:
        lines = ",\n    ".join(json.dumps(row) for row in record[key])
        text += f',\n  "{key}": [\n    {lines}\n  ]' if lines else f',\n  "{key}": []'
    return text + "\n}\n"
