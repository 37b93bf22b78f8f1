"""The command ``labkit compare``, which runs the contenders of a comparison in turns.

Contenders are all techniques, and PyTorch's counterparts; a model may be cut in several places.
The main setting has the most training samples; the others have fewer. A repeat runs all settings,
and in each setting all contenders; each repeat begins with another contender. Other load on the
machine then affects all contenders in the same way, and they are compared by their ratios within a
repeat. Repeat r of every contender uses seed r.
"""

import math
import shlex
from collections.abc import Sequence
from typing import Any

from labkit import strategies
from labkit.engine import devices
from labkit.engine.errors import WorkerError
from labkit.engine.runtime.preload import warm_up
from labkit.training.config import RunConfig, parse_split_points
from labkit.training.resolve import find_technique, options_of, resolve
from labkit.training.train_run import TrainResult, train_run
from labkit.training.work import NOTHING, imported, samples_for
from labkit.units import check_above_zero, check_integer
from workbook.measure.compare.summary import SINGLE, Record, report
from workbook.measure.record import machine, write
from workbook.measure.turns import in_turn

# The first epoch is warm-up, and two more give an epoch's time.
_EPOCHS_FOR_TIME = 3
# A run that takes longer is not going to end.
_TIMEOUT_S = 300
# What the record keeps of a run, besides its difference from one device.
_KEPT = ("note", "epochs", "bytes_sent", "messages", "peak_memory", "replicas_agree")

Row = dict[str, Any]


def main(json_path: str | None = None, words: Sequence[str] = (), **settings: Any) -> int:
    """Run the comparison; print its tables, and write the record.

    ``words`` are the command line, for the record, and ``settings`` those arguments of ``compare``
    that it gives. Returns the exit status: 1 if a contender started and failed, else 0.
    """
    record: Record = {"command": shlex.join(["labkit", *words])} | compare(**settings)
    print(report(record))
    if json_path is not None:
        write(record, json_path)
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
    plain: Row = {"builtin": False, "backend": "auto", "counterpart": None}
    contenders: dict[str, Row] = {SINGLE: plain | {"strategy": SINGLE, "ranks": 1}}
    for name in names or strategies.STRATEGIES:
        if name == SINGLE:
            continue
        settings = plain | {"strategy": name}
        torchs = find_technique(name, builtin=True)
        counterpart = torchs.__name__
        contenders[name] = settings | {"counterpart": counterpart}
        if name == "model_parallel":
            for points in split_points:
                ranks = len(parse_split_points(points)) + 1
                contenders[f"{name} {points}"] = settings | {
                    "split_points": points,
                    "ranks": ranks,
                }
        builtin = settings | {"builtin": True}
        contenders.setdefault(counterpart, builtin)
        if "backend" in options_of(torchs) and devices.plan(1, device).backend == "gloo":
            contenders.setdefault(f"{counterpart} (labkit)", builtin | {"backend": "labkit"})
    return [{"name": name} | row for name, row in contenders.items()]


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
) -> Record:
    """Run the comparison and return its record; what has run is printed.

    The arguments are the command's options. The world size is by default the number of cores or
    GPUs, 4 at most; train sizes are a quarter, a half and all of the data. Without ``builtin``
    PyTorch's counterparts are left out.
    """
    check_above_zero("the target, an accuracy,", target, 1)
    check_integer("epochs", epochs)
    check_integer("repeats", repeats)
    contenders = find_contenders(strategies, device, split_points)
    if not builtin:
        contenders = [contender for contender in contenders if not contender["builtin"]]
    if world_size is None:
        num_gpus = len(set(devices.plan(4, device).devices) - {"cpu"})
        world_size = min(4, num_gpus or devices.num_cores())
    common: Row = {"model": model, "dataset": dataset, "device": device, "lr": lr}
    common |= {"optimizer": optimizer, "world_size": world_size, "batch_size": batch_size}
    largest = RunConfig(**common, strategy="ddp", train_size=max(train_sizes, default=None))
    own_work = imported(largest, NOTHING)
    if not train_sizes:
        count = len(samples_for(largest, own_work)[0])
        train_sizes = (max(1, count // 4), max(1, count // 2), count)
    settings = settings_of(world_size, train_sizes, batch_size, epochs)
    # Before anything runs: settings with which no run could start.
    for setting in settings:
        RunConfig(**common | setting, strategy="ddp")
    resolve(RunConfig(**common | {"world_size": 1}), own_work)
    print("contenders:", *(contender["name"] for contender in contenders), flush=True)
    warm_up()
    record: Record = {
        "config": common | {"target": target, "repeats": repeats},
        "contenders": contenders,
        "settings": settings,
        "runs": [],
        "skipped": [],
    }
    for repeat in range(repeats):
        for number, setting in enumerate(settings):
            run_all(record, common, number, repeat)
            print(f"repeat {repeat + 1}, {setting}", flush=True)
    return record | machine()


def settings_of(
    world_size: int, train_sizes: Sequence[int], batch_size: int, epochs: int
) -> list[Row]:
    """The main setting first; the others only measure times, and run three epochs at most."""
    *smaller, largest = sorted(set(train_sizes))
    main = {"world_size": world_size, "train_size": largest, "batch_size": batch_size}
    main["epochs"] = epochs
    timed = main | {"epochs": min(epochs, _EPOCHS_FOR_TIME)}
    return [main, *(timed | {"train_size": train_size} for train_size in smaller)]


def run_all(record: Record, common: Row, number: int, repeat: int) -> None:
    """Run each contender once in setting ``number``; append to ``runs`` or, why not, ``skipped``.

    A contender that was skipped before is left out.
    """
    setting = record["settings"][number]
    skipped = {row["contender"] for row in record["skipped"]}
    contenders = {row["name"]: row for row in record["contenders"] if row["name"] not in skipped}
    results: dict[str, TrainResult] = {}
    for name in in_turn(contenders, repeat):
        config = config_of(contenders[name], common | setting | {"seed": repeat})
        try:
            results[name] = train_run(RunConfig(**config), timeout_s=_TIMEOUT_S)
        except (ValueError, WorkerError) as error:
            # A technique refuses what it cannot do by ValueError, before a rank starts.
            row = {"contender": name, **setting, "reason": str(error).strip().splitlines()[0]}
            record["skipped"].append(row | {"failed": isinstance(error, WorkerError)})
    for name, result in results.items():
        facts = result.as_dict()
        row = {"contender": name, "setting": number, "repeat": repeat}
        row |= {key: facts.get(key) for key in _KEPT}
        if SINGLE in results:
            difference = result.difference_from(results[SINGLE])
            row["difference_from_single"] = difference if math.isfinite(difference) else None
        record["runs"].append(row)


def config_of(contender: Row, config: Row) -> Row:
    """The settings of a run, on the ranks of this contender: one device has one, a cut its own."""
    config = dict(config)
    for name in ("strategy", "builtin", "backend", "split_points"):
        config[name] = contender.get(name)
    ranks = contender.get("ranks", config["world_size"])
    config["world_size"] = ranks
    if config["strategy"] == "mesh":
        # Only the transformer's layers can be cut.
        other_side = "tp" if config["model"] == "gpt" else "pp"
        config[other_side] = math.gcd(2, ranks)
        config["dp"] = ranks // config[other_side]
    return config
