"""Run the contenders of a comparison in turns.

Contenders are the techniques that split the batch over the ranks, and PyTorch's counterparts.
There is one main setting; each of the others differs from it in one value. A repeat runs all
settings, and in each setting all contenders; each repeat begins with another contender. Other load
on the machine then affects all contenders in the same way, and they are compared by their ratios
within a repeat. Repeat r of every contender uses seed r.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from labkit import devices, strategies
from labkit.config import STAGED, RunConfig
from labkit.errors import WorkerError
from labkit.runtime.preload import warm_up
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.tracing import Span, Trace
from labkit.training.resolve import NOTHING, check_names, make_strategy, samples_for
from labkit.training.train_run import TrainResult, train_run
from labkit.units import check_above_zero, check_integer
from labkit.workload.datasets import load_dataset
from workbook.measure.compare.summary import SINGLE
from workbook.measure.record import machine
from workbook.measure.spread import rounded
from workbook.measure.turns import repeat_turns

# Without a number of repeats, no setting begins later than this.
BUDGET_S, MOST_REPEATS = 480.0, 5
# The first epoch is warm-up, and two more give an epoch's time.
_EPOCHS_FOR_TIME = 3
_LOADS = 5
# A run that takes longer is not going to end.
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Contender:
    """One technique in one implementation.

    Attributes:
        name: for ours, the strategy's; for PyTorch's, its class, and the backend if it has two.
        strategy, builtin, backend: as in ``RunConfig``.
        counterpart: for ours, the name of PyTorch's counterpart, if it has one.
        own_pace: its ranks do not wait for each other, so its parameters may differ from those
            of one device.
    """

    name: str
    strategy: str
    builtin: bool = False
    backend: str = "auto"
    counterpart: str | None = None
    own_pace: bool = False


@dataclass(frozen=True)
class Setting:
    """The values that are the same for all contenders."""

    world_size: int
    train_size: int
    batch_size: int
    epochs: int


def find_contenders(names: tuple[str, ...] = (), device: str = "auto") -> list[Contender]:
    """The contenders of these techniques, ours and PyTorch's; ``single``, the baseline, is first.

    A class of PyTorch that is the counterpart of several techniques takes part once. If it has an
    option for the backend and the ranks are on the CPU, it takes part on our backend as well.

    Args:
        names: the techniques; by default all that split the batch. Those that split the model,
            which are for models that do not fit one device, take part only if they are named.
        device: as in ``RunConfig``.

    Raises:
        ValueError: a name that is not registered.
    """
    found = {SINGLE: Contender(SINGLE, SINGLE)}
    for name in names or [one for one in strategies.STRATEGIES if one not in STAGED]:
        ours, theirs = strategies.get(name), strategies.get(name, builtin=True)
        if ours is theirs:  # one device
            continue
        own_pace, their = issubclass(ours, AsyncParameterServer), theirs.__name__
        found[name] = Contender(name, name, counterpart=their, own_pace=own_pace)
        found.setdefault(their, Contender(their, name, True, own_pace=own_pace))
        if "backend" in theirs.options() and devices.plan(1, device).backend == "gloo":
            on_ours = f"{their} (labkit)"
            found.setdefault(on_ours, Contender(on_ours, name, True, "labkit", own_pace=own_pace))
    return list(found.values())


def settings_of(
    world_sizes: tuple[int, ...],
    train_sizes: tuple[int, ...],
    batch_sizes: tuple[int, ...],
    epochs: int,
    units: int,
) -> list[Setting]:
    """The main setting first, then every setting that differs from it in one value, once.

    Args:
        world_sizes: the main one is the largest with a core (or GPU) for each rank.
        train_sizes: the main one is the largest.
        batch_sizes: the main one is the middle one.
        epochs: of the main setting; the others only measure times, and run three at most.
        units: the number of cores or GPUs.
    """
    main = max((size for size in world_sizes if size <= units), default=min(world_sizes))
    sizes, batch = max(train_sizes), statistics.median_low(batch_sizes)
    fewer = min(epochs, _EPOCHS_FOR_TIME)
    settings = [Setting(main, sizes, batch, epochs)]
    settings += [Setting(p, sizes, batch, fewer) for p in world_sizes if p != main]
    settings += [Setting(main, n, batch, fewer) for n in train_sizes if n != sizes]
    settings += [Setting(main, sizes, b, fewer) for b in batch_sizes if b != batch]
    return list(dict.fromkeys(settings))


def compare(
    strategies: tuple[str, ...] = (),
    world_sizes: tuple[int, ...] = (1, 2, 3, 4),
    train_sizes: tuple[int, ...] = (),
    batch_sizes: tuple[int, ...] = (64, 128, 256),
    repeats: int | None = None,
    epochs: int = 6,
    target: float = 0.95,
    model: str = "small_cnn",
    dataset: str = "digits",
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run the comparison and return its record.

    Args:
        strategies: techniques out of ``labkit.strategies.STRATEGIES``, by default all that share
            out the batch; PyTorch's counterparts and ``single`` always take part.
        world_sizes, train_sizes, batch_sizes: what to vary, one at a time, see ``settings_of``.
            Train sizes are by default a quarter, a half and all of the data.
        repeats: of everything; None takes as many as fit into eight minutes, 5 at most.
        epochs, target: of the main setting, and the held-out accuracy to reach, 0 to 1.
        model, dataset, device: as in ``RunConfig``.
        say: called with each line of progress.

    Raises:
        ValueError: unknown names, impossible numbers.
        FileNotFoundError: the data set is not there.
    """
    check_above_zero("the target, an accuracy,", target, 1)
    check_integer("epochs", epochs)
    check_integer("repeats", MOST_REPEATS if repeats is None else repeats)
    contenders = find_contenders(strategies, device)
    gpus = len(set(devices.plan(max(world_sizes), device).devices) - {"cpu"})
    count = len(load_dataset(dataset, train_size=max(train_sizes, default=None)).train_targets)
    train_sizes = train_sizes or (max(1, count // 4), max(1, count // 2), count)
    varied = world_sizes, train_sizes, batch_sizes
    settings = settings_of(*varied, epochs, gpus or devices.num_cores())
    common: dict[str, Any] = {"model": model, "dataset": dataset, "device": device}
    # Before anything runs: settings with which no run could start.
    for setting in settings:
        RunConfig(**common, **asdict(setting), strategy="ddp")
    config = RunConfig(**common)
    check_names(config, NOTHING)
    make_strategy(config)
    say(f"{len(contenders)} contenders: {', '.join(one.name for one in contenders)}")
    warm_up()
    found = {"loading": time_loading(common, settings), "runs": [], "skipped": []}
    deadline_s = time.monotonic() + BUDGET_S if repeats is None else math.inf
    for repeat, number in itertools.product(range(repeats or MOST_REPEATS), range(len(settings))):
        if time.monotonic() > deadline_s:
            say(f"the time is up in repeat {repeat + 1}: give --repeats for more")
            break
        rows, skipped = take_turns(contenders, settings, number, common, repeat, found["skipped"])
        found["runs"] += rows
        found["skipped"] += skipped
        for row in skipped:
            say(f"not run: {row['contender']} on {row['world_size']} ranks: {row['reason']}")
        say(f"repeat {repeat + 1}, setting {number + 1} of {len(settings)}: {settings[number]}")
    return {
        "config": common | {"target": target, "repeats": repeats, "gpus_used": gpus},
        "contenders": [asdict(one) for one in contenders],
        "settings": [asdict(setting) for setting in settings],
        **found,
        **machine(),
    }


def time_loading(common: dict[str, Any], settings: list[Setting]) -> list[dict[str, Any]]:
    """Time in turns how long a rank takes to load each number of training samples."""

    def load(size: int) -> float:
        begun_s = time.perf_counter()
        samples_for(RunConfig(**common, train_size=size), NOTHING)
        return time.perf_counter() - begun_s

    sizes = sorted({setting.train_size for setting in settings})
    turns = {size: lambda size=size: load(size) for size in sizes}
    # The first round reads the files into the system's memory.
    repeat_turns(turns, 1)
    seconds = repeat_turns(turns, _LOADS)
    return [{"train_size": size, "seconds": rounded(each)} for size, each in seconds.items()]


def take_turns(
    contenders: list[Contender],
    settings: list[Setting],
    number: int,
    common: dict[str, Any],
    repeat: int,
    skipped: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run each contender once in a setting: (a row of each run, of each without a result).

    Who has failed on as many ranks before (``skipped``) is left out. One device does not depend on
    the world size, so it runs only at that of the main setting.
    """
    setting, out = settings[number], {(row["contender"], row["world_size"]) for row in skipped}
    if setting.world_size != settings[0].world_size:
        out.add((SINGLE, setting.world_size))
    names = [one for one in contenders if (one.name, setting.world_size) not in out]
    first = repeat % max(1, len(names))
    results: dict[str, TrainResult] = {}
    failed = []
    for one in names[first:] + names[:first]:
        config: dict[str, Any] = common | asdict(setting) | {"seed": repeat}
        config |= {"strategy": one.strategy, "builtin": one.builtin, "backend": one.backend}
        if one.name == SINGLE:
            config["world_size"] = 1
        try:
            results[one.name] = train_run(RunConfig(**config), timeout_s=_TIMEOUT_S)
        except (ValueError, WorkerError) as error:
            # A technique refuses what it cannot do by ValueError, before a rank starts.
            row = {"contender": one.name, **asdict(setting)}
            row |= {"failed": isinstance(error, WorkerError)}
            failed.append(row | {"reason": str(error).strip().splitlines()[0]})
    rows = []
    for name, result in results.items():
        told, row = result.as_dict(), {"contender": name, "setting": number, "repeat": repeat}
        kept = ("epochs", "bytes_sent", "messages", "peak_memory", "replicas_agree")
        row |= {key: told[key] for key in kept} | {"note": told.get("note")}
        row["epoch_phases_s"] = epoch_phases(result.trace, [e["seconds"] for e in result.epochs])
        if SINGLE in results:
            far = result.difference_from(results[SINGLE])
            row["difference_from_single"] = far if math.isfinite(far) else None
        rows.append(row)
    return rows, failed


def epoch_phases(trace: Trace, seconds: list[float]) -> dict[str, list[dict[str, float]]]:
    """``{role: [{kind of span: seconds} of each epoch]}``, means over the ranks of a role.

    A ``worker`` computes a share of the batch, a ``stage`` a part of the model, a ``server``
    nothing. Evaluation is outside the epochs. Where ranks do not wait for each other, no
    evaluation parts the epochs, and ``seconds`` of the server's do.
    """
    by_rank = {rank: Trace(tuple(trace.of(rank))) for rank in trace.ranks}
    loading = next(one for one in by_rank.values() if "data" in one.kinds)
    windows = training_windows(loading.spans)
    if len(windows) != len(seconds):
        ends_s = itertools.accumulate(seconds, initial=trace.spans[0].start_s)
        windows = list(itertools.pairwise(ends_s))
    by_role: dict[str, list[list[dict[str, float]]]] = {}
    for own in by_rank.values():
        role = "stage" if {"forward", "backward"} & {*own.kinds} else "server"
        role = "worker" if "compute" in own.kinds else role
        epochs = [own.between(*window).seconds_by_kind() for window in windows]
        by_role.setdefault(role, []).append(epochs)
    return {role: [_means(rows) for rows in zip(*ranks)] for role, ranks in by_role.items()}


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    kinds = sorted(set().union(*rows))
    return {kind: statistics.fmean(row.get(kind, 0.0) for row in rows) for kind in kinds}


def training_windows(spans: tuple[Span, ...]) -> list[tuple[float, float]]:
    """(start, end) of each stretch of training in the spans of a rank that loads data."""
    windows, start_s = [], None
    for span in spans:
        if span.kind == "data" and start_s is None:
            start_s = span.start_s
        elif span.kind == "evaluate" and start_s is not None:
            windows.append((start_s, span.start_s))
            start_s = None
    return windows
