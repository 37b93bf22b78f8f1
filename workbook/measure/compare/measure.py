"""The command ``labkit compare``, which runs the contenders of a comparison in turns.

Contenders are all techniques, and PyTorch's counterparts; a model may be cut in several places.
The main setting has the most training samples; the others have fewer. A repeat runs all settings,
and in each setting all contenders; each repeat begins with another contender. Other load on the
machine then affects all contenders in the same way, and they are compared by their ratios within a
repeat. Repeat r of every contender uses seed r.
"""

import itertools
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit import devices, strategies
from labkit.config import RunConfig, parse_split_points
from labkit.errors import WorkerError
from labkit.files import check_writable
from labkit.placement import VGG16_SPLITS
from labkit.runtime.preload import warm_up
from labkit.training.resolve import NOTHING, imported, resolve, samples_for
from labkit.training.train_run import TrainResult, train_run
from labkit.units import check_above_zero, check_integer
from workbook.measure.compare.summary import SINGLE, Record, report
from workbook.measure.record import machine, write
from workbook.measure.turns import in_turn

# The first epoch is warm-up, and two more give an epoch's time.
_EPOCHS_FOR_TIME = 3
# A run that takes longer is not going to end.
_TIMEOUT_S = 300

Row = dict[str, Any]


def main(
    json_path: str | None = None,
    figures_dir: str | None = None,
    words: Sequence[str] = (),
    **settings: Any,
) -> int:
    """Run the comparison; print its tables, write the record and the figures.

    Figures go to an existing folder. ``words`` are the command line, for the record, and
    ``settings`` those arguments of ``compare`` that it gives. Returns the exit status: 1 if a
    contender started and failed, else 0.
    """
    if figures_dir is not None:
        check_writable(Path(figures_dir, "compare"))
    record: Record = {"command": shlex.join(["labkit", *words])} | compare(**settings)
    print(report(record))
    paths = {}
    if figures_dir is not None:
        from workbook.measure.compare.figures import draw

        paths = {f"{figures_dir}/compare_{name}.png": one for name, one in draw(record).items()}
    write(record, json_path, paths)
    return int(any(row["failed"] for row in record["skipped"]))


def find_contenders(
    names: tuple[str, ...] = (), device: str = "auto", split_points: Sequence[str] = ()
) -> list[Row]:
    """The contenders of these techniques, ours and PyTorch's; ``single``, the baseline, is first.

    By default all techniques. Those that cut the model cut it into even stages; each of
    ``split_points`` is one more contender, on as many ranks as it has stages. A class of PyTorch
    that is the counterpart of several techniques takes part once; if it has an option for the
    backend and the ranks are on the CPU, on our backend as well.
    """

    def contender(name: str, **more: Any) -> Row:
        common = {"strategy": name, "builtin": False, "backend": "auto", "counterpart": None}
        return {"name": name} | common | more

    found = {SINGLE: contender(SINGLE, ranks=1)}
    for name in names or strategies.STRATEGIES:
        ours, theirs = strategies.get(name), strategies.get(name, builtin=True)
        if ours is theirs:  # one device
            continue
        their, how = theirs.__name__, {"strategy": name, "builtin": True}
        found[name] = contender(name, counterpart=their)
        for points in split_points if name == "model_parallel" else ():
            cut, ranks = f"{name} {points}", len(parse_split_points(points)) + 1
            found[cut] = contender(cut, strategy=name, split_points=points, ranks=ranks)
        found.setdefault(their, contender(their, **how))
        if "backend" in theirs.options() and devices.plan(1, device).backend == "gloo":
            on_ours = f"{their} (labkit)"
            found.setdefault(on_ours, contender(on_ours, **how, backend="labkit"))
    return list(found.values())


def compare(
    strategies: tuple[str, ...] = (),
    world_size: int | None = None,
    train_sizes: tuple[int, ...] = (),
    batch_size: int = 128,
    repeats: int = 3,
    epochs: int = 6,
    target: float = 0.95,
    model: str = "small_cnn",
    dataset: str = "digits",
    device: str = "auto",
    lr: float | None = None,
    split_points: Sequence[str] = (),
    optimizer: str = "sgd",
    builtin: bool = True,
) -> Row:
    """Run the comparison and return its record; what has run is printed.

    The arguments are the command's options. The world size is by default the number of cores or
    GPUs, 4 at most; train sizes are a quarter, a half and all of the data. VGG16 is by default
    also placed as in the experiment that the course corrects. Without ``builtin`` PyTorch's
    counterparts are left out.
    """
    check_above_zero("the target, an accuracy,", target, 1)
    check_integer("epochs", epochs)
    check_integer("repeats", repeats)
    placed = [VGG16_SPLITS[f"{n} devices"] for n in (2, 3, 4)] if model == "vgg16" else []
    split_points = split_points or [",".join(map(str, points)) for points in placed]
    contenders = find_contenders(strategies, device, split_points)
    contenders = [one for one in contenders if builtin or not one["builtin"]]
    if world_size is None:
        gpus = len(set(devices.plan(4, device).devices) - {"cpu"})
        world_size = min(4, gpus or devices.num_cores())
    common: Row = {"model": model, "dataset": dataset, "device": device, "lr": lr}
    common |= {"optimizer": optimizer, "world_size": world_size, "batch_size": batch_size}
    largest = RunConfig(**common, strategy="ddp", train_size=max(train_sizes, default=None))
    own = imported(largest, NOTHING)
    count = len(samples_for(largest, own)[0])
    train_sizes = train_sizes or (max(1, count // 4), max(1, count // 2), count)
    settings = settings_of(world_size, train_sizes, batch_size, epochs)
    # Before anything runs: settings with which no run could start.
    for setting in settings:
        RunConfig(**common | setting, strategy="ddp")
    resolve(RunConfig(**common | {"world_size": 1}), own)
    print("contenders:", *(one["name"] for one in contenders), flush=True)
    warm_up()
    found: dict[str, list[Row]] = {"runs": [], "skipped": []}
    for repeat, number in itertools.product(range(repeats), range(len(settings))):
        run_all(contenders, settings, number, common, repeat, found)
        print(f"repeat {repeat + 1}, {settings[number]}", flush=True)
    config = common | {"target": target, "repeats": repeats}
    return {"config": config, "contenders": contenders, "settings": settings, **found, **machine()}


def settings_of(
    world_size: int, train_sizes: Sequence[int], batch_size: int, epochs: int
) -> list[Row]:
    """The main setting first; the others only measure times, and run three epochs at most."""
    sizes = sorted({*train_sizes}, reverse=True)
    settings = []
    for train_size in [sizes[0], *reversed(sizes[1:])]:
        ran = epochs if train_size == sizes[0] else min(epochs, _EPOCHS_FOR_TIME)
        setting = {"world_size": world_size, "train_size": train_size, "batch_size": batch_size}
        settings.append(setting | {"epochs": ran})
    return settings


def run_all(
    contenders: list[Row],
    settings: list[Row],
    number: int,
    common: Row,
    repeat: int,
    found: dict[str, list[Row]],
) -> None:
    """Run each contender once in a setting; append to ``runs``, or to ``skipped`` with a reason.

    Who was skipped before is left out. One device, and a placement, have ranks of their own.
    """
    setting = settings[number]
    results = dict[str, TrainResult]()
    out = {row["contender"] for row in found["skipped"]}
    left = {one["name"]: one for one in contenders if one["name"] not in out}
    for name in in_turn(left, repeat):
        config = common | setting | {"seed": repeat}
        config |= {key: left[name][key] for key in ("strategy", "builtin", "backend")}
        config |= {"split_points": left[name].get("split_points")}
        config["world_size"] = ranks = left[name].get("ranks", config["world_size"])
        if config["strategy"] == "mesh":
            # Only the transformer's layers can be cut.
            side = 1 + (ranks % 2 == 0)
            config |= {"dp": ranks // side, "tp" if config["model"] == "gpt" else "pp": side}
        try:
            results[name] = train_run(RunConfig(**config), timeout_s=_TIMEOUT_S)
        except (ValueError, WorkerError) as error:
            # A technique refuses what it cannot do by ValueError, before a rank starts.
            reason = str(error).strip().splitlines()[0]
            row = {"contender": name, **setting, "reason": reason}
            found["skipped"].append(row | {"failed": isinstance(error, WorkerError)})
    for name, result in results.items():
        told, row = result.as_dict(), Row(contender=name, setting=number, repeat=repeat)
        kept = ("epochs", "bytes_sent", "messages", "peak_memory", "replicas_agree")
        row |= {key: told[key] for key in kept} | {"note": told.get("note")}
        if SINGLE in results:
            far = result.difference_from(results[SINGLE])
            row["difference_from_single"] = far if math.isfinite(far) else None
        found["runs"].append(row)
