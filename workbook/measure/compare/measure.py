"""Run the contenders of a comparison in turns, within a time budget.

Contenders are the techniques that split the batch over the ranks, and PyTorch's counterparts.
There is one main setting; each of the others differs from it in one value. A repeat runs all
settings, and in each setting all contenders; each repeat begins with another contender. Other load
on the machine then affects all contenders in the same way, and they are compared by their ratios
within a repeat. Repeat r of every contender uses seed K + r.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from labkit import devices, strategies
from labkit.comm.peak_memory import as_dicts
from labkit.config import STAGED, RunConfig
from labkit.errors import WorkerError
from labkit.runtime.preload import warm_up
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.training.resolve import NOTHING, resolve, samples_for
from labkit.training.train_run import TrainResult, train_run
from labkit.units import MOST_SECONDS, check_above_zero, check_integer, format_count
from labkit.workload.datasets import load_dataset
from workbook.measure.compare.phases import epochs_by_role, short
from workbook.measure.compare.summary import SINGLE
from workbook.measure.record import machine
from workbook.measure.spread import rounded

# Ten minutes, less a reserve for a setting that takes longer than it did the last time.
BUDGET_S = 480.0
MOST_REPEATS = 5
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
    for name in names:
        strategies.get(name)
    by_default = [name for name in strategies.STRATEGIES if name not in STAGED]
    found, seen = [Contender(SINGLE, SINGLE)], {strategies.get(SINGLE)}
    for name in dict.fromkeys(names or by_default):
        if name == SINGLE:
            continue
        ours, theirs = strategies.get(name), strategies.get(name, builtin=True)
        counterpart = None if theirs is ours else theirs.__name__
        own_pace = issubclass(ours, AsyncParameterServer)
        found.append(Contender(name, name, counterpart=counterpart, own_pace=own_pace))
        if theirs in seen | {ours}:
            continue
        seen.add(theirs)
        backends = {theirs.__name__: "auto"}
        if "backend" in theirs.options() and devices.plan(1, device).backend == "gloo":
            backends[f"{theirs.__name__} (labkit)"] = "labkit"
        own_pace = issubclass(theirs, AsyncParameterServer)
        found += [Contender(n, name, True, b, own_pace=own_pace) for n, b in backends.items()]
    return found


@dataclass(frozen=True)
class Setting:
    """The values that are the same for all contenders."""

    world_size: int
    train_size: int
    batch_size: int
    epochs: int

    def __str__(self) -> str:
        ranks = format_count(self.world_size, "rank")
        return f"{ranks}, {self.train_size} samples, batches of {self.batch_size}"


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
    fitting = [size for size in world_sizes if size <= units]
    main = max(fitting) if fitting else min(world_sizes)
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
    budget_s: float = BUDGET_S,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run the comparison and return its record.

    Args:
        strategies: techniques out of ``labkit.strategies.STRATEGIES``, by default all that share
            out the batch; PyTorch's counterparts and ``single`` always take part.
        world_sizes, train_sizes, batch_sizes: what to vary, one at a time, see ``settings_of``.
            Train sizes are by default a quarter, a half and all of the data.
        repeats: of everything; None takes as many as fit into ``budget_s`` seconds, 1 to 5.
        epochs, target: of the main setting, and the held-out accuracy to reach, 0 to 1.
        model, dataset, device: as in ``RunConfig``.
        say: called with each line of progress.

    Raises:
        ValueError: unknown names, impossible numbers.
        FileNotFoundError: the data set is not there.
    """
    check_above_zero("the target, an accuracy,", target, 1)
    check_above_zero("budget_s", budget_s, MOST_SECONDS)
    counts = {"train_size": train_sizes, "batch_size": batch_sizes, "epochs": (epochs,)}
    for name, values in (counts | {"repeats": () if repeats is None else (repeats,)}).items():
        for value in values:
            check_integer(name, value)
    list(map(devices.check_world_size, world_sizes))
    contenders = find_contenders(strategies, device)
    gpus = len(set(devices.plan(max(world_sizes), device).devices) - {"cpu"})
    if not train_sizes:
        count = len(load_dataset(dataset).train_targets)
        train_sizes = tuple(sorted({max(1, count // 4), max(1, count // 2), count}))
    varied = world_sizes, train_sizes, batch_sizes
    settings = settings_of(*varied, epochs, gpus or devices.num_cores())
    common: dict[str, Any] = {"model": model, "dataset": dataset, "device": device, "seed": 0}
    comparison = Comparison(contenders, settings, common, say)
    comparison.check()
    say(f"{len(contenders)} contenders: {', '.join(one.name for one in contenders)}")
    warm_up()
    loading = comparison.load()
    comparison.run(repeats, budget_s)
    return {
        "config": common | {"target": target, "repeats": repeats, "gpus_used": gpus},
        "contenders": [asdict(one) for one in contenders],
        "settings": [asdict(setting) for setting in settings],
        "runs": comparison.runs,
        "skipped": comparison.skipped,
        "loading": loading,
        **machine(),
    }


@dataclass
class Comparison:
    """The runs of a comparison, collected as they end.

    Attributes:
        common: the arguments of ``RunConfig`` that are the same for all runs.
        say: called with each line of progress.
        runs: a row for each run.
        skipped: a row for each run without a result, with the reason; ``failed`` if it started.
    """

    contenders: list[Contender]
    settings: list[Setting]
    common: dict[str, Any]
    say: Callable[[str], None]
    runs: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def check(self) -> None:
        """Raise ValueError, before anything runs, for settings with which no run could start."""
        for setting in self.settings:
            RunConfig(**self.common, **asdict(setting))
        config = RunConfig(**self.common)
        resolve(config, NOTHING)
        most = max(setting.train_size for setting in self.settings)
        load_dataset(self.common["dataset"], train_size=most)

    def load(self) -> list[dict[str, Any]]:
        """Time in turns how long a rank takes to load each number of training samples."""
        sizes = sorted({setting.train_size for setting in self.settings})
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(_LOADS + 1):
            for size in sizes:
                begun_s = time.perf_counter()
                samples_for(RunConfig(**self.common, train_size=size), NOTHING)
                seconds[size].append(time.perf_counter() - begun_s)
        # The first one reads the files into the system's memory.
        return [{"train_size": n, "seconds": rounded(each[1:])} for n, each in seconds.items()]

    def run(self, repeats: int | None, budget_s: float) -> None:
        """Run everything ``repeats`` times, or as often as fits into ``budget_s``.

        Without a number of repeats, every setting runs once while there is time, then again, up
        to ``MOST_REPEATS`` times, as long as its last duration still fits.
        """
        started_s = time.perf_counter()
        took_s = dict.fromkeys(self.settings, 0.0)
        for repeat in range(repeats or MOST_REPEATS):
            for setting in self.settings:
                begun_s = time.perf_counter()
                left_s = budget_s - (begun_s - started_s)
                if repeats is not None or took_s[setting] < left_s:
                    self._repeat(setting, repeat)
                    took_s[setting] = time.perf_counter() - begun_s
                    self.say(f"repeat {repeat + 1}, {setting}: {took_s[setting]:.0f} s")
                elif repeat == 0:
                    self._skip("all contenders", setting, "the time budget was used up")

    def _repeat(self, setting: Setting, repeat: int) -> None:
        """Run each contender once, and compare it with ``single`` where that takes part."""
        taking_part = [one for one in self.contenders if self._takes_part(one, setting)]
        first = repeat % max(1, len(taking_part))
        results: dict[str, tuple[dict, TrainResult]] = {}
        for contender in taking_part[first:] + taking_part[:first]:
            name = contender.name
            config: dict[str, Any] = self.common | asdict(setting)
            config |= {"seed": config["seed"] + repeat, "strategy": contender.strategy}
            config |= {"builtin": contender.builtin, "backend": contender.backend}
            if name == SINGLE:
                config["world_size"] = 1
            try:
                result = train_run(RunConfig(**config), timeout_s=_TIMEOUT_S)
            except (ValueError, WorkerError) as error:
                # A technique refuses what it cannot do by ValueError, before a rank starts.
                reason = str(error).strip().splitlines()[0]
                self._skip(name, setting, reason, failed=isinstance(error, WorkerError))
                continue
            row = {"contender": name, "setting": self.settings.index(setting), "repeat": repeat}
            results[name] = row | _numbers(result), result
        for row, result in results.values():
            if SINGLE in results:
                far = result.difference_from(results[SINGLE][1])
                row["difference_from_single"] = far if math.isfinite(far) else None
            self.runs.append(row)

    def _takes_part(self, contender: Contender, setting: Setting) -> bool:
        # One device does not depend on the world size, so it runs only at that of the main one.
        if contender.name == SINGLE:
            return setting.world_size == self.settings[0].world_size
        left_out = {(row["contender"], row["world_size"]) for row in self.skipped}
        return (contender.name, setting.world_size) not in left_out

    def _skip(self, name: str, setting: Setting, reason: str, *, failed: bool = False) -> None:
        row = {"contender": name, **asdict(setting), "reason": reason, "failed": failed}
        self.skipped.append(row)
        self.say(f"{'failed' if failed else 'skipped'}: {name}, {setting}: {reason}")


def _numbers(result: TrainResult) -> dict[str, Any]:
    """What the record holds of a run; an epoch's phases are recorded by role."""
    return {
        "epochs": [
            {key: short(value) for key, value in epoch.items() if key != "phases_s"}
            for epoch in result.epochs
        ],
        "epoch_phases_s": epochs_by_role(result.trace, [row["seconds"] for row in result.epochs]),
        "bytes_sent": result.bytes_sent,
        "messages": result.messages,
        "peak_memory": as_dicts(result.peak_memory),
        "replicas_agree": result.replicas_agree,
        "note": result.notes.get("note"),
    }
