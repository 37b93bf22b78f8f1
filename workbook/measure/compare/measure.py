"""Run the contenders of a comparison in turns, within a time budget.

A repeat runs all settings, and in each setting all contenders; each repeat begins with another
contender. Other load on the machine then affects all contenders in the same way, and they are
compared by their ratios within a repeat. Repeat r of every contender uses seed K + r.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from labkit import devices
from labkit.comm.peak_memory import as_dicts
from labkit.config import RunConfig
from labkit.errors import WorkerError
from labkit.runtime.preload import warm_up
from labkit.training.resolve import NOTHING, check_names, make_strategy, samples_for
from labkit.training.train_run import TrainResult, train_run
from labkit.units import MOST_SECONDS, check_above_zero, check_integer
from labkit.workload.datasets import load_dataset
from workbook.measure.compare.contenders import (
    SINGLE,
    Contender,
    Setting,
    find_contenders,
    settings_of,
)
from workbook.measure.compare.phases import epochs_by_role, phases_by_role, short
from workbook.measure.record import machine
from workbook.measure.spread import rounded

# Ten minutes, less a reserve for a setting that takes longer than it did the last time.
BUDGET_S = 480.0
MOST_REPEATS = 5
_LOADS = 5
# A run that takes longer is not going to end.
_TIMEOUT_S = 300


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
    _check_counts(world_sizes, counts | ({} if repeats is None else {"repeats": (repeats,)}))
    contenders = find_contenders(strategies, device)
    gpus = len(set(devices.plan(max(world_sizes), device).devices) - {"cpu"})
    sizes = train_sizes or _parts_of(dataset)
    settings = settings_of(world_sizes, sizes, batch_sizes, epochs, gpus or devices.num_cores())
    common = {"model": model, "dataset": dataset, "device": device, "seed": RunConfig().seed}
    comparison = Comparison(contenders, settings, common, say)
    comparison.check()
    say(f"{len(contenders)} contenders: {', '.join(one.name for one in contenders)}")
    comparison.prepare()
    comparison.run(repeats, budget_s)
    return comparison.record({"target": target, "repeats": repeats, "gpus_used": gpus})


def _check_counts(world_sizes: tuple[int, ...], counts: dict[str, tuple[int, ...]]) -> None:
    """Check the values from which settings are made; ``RunConfig`` would check them too late."""
    for name, sizes in (("world_sizes", world_sizes), ("batch_sizes", counts["batch_size"])):
        if not sizes:
            raise ValueError(f"{name} is empty: name at least one")
    for world_size in world_sizes:
        devices.check_world_size(world_size)
    for name, values in counts.items():
        for value in values:
            check_integer(name, value)


def _parts_of(dataset: str) -> tuple[int, ...]:
    """A quarter, a half and all of its training samples."""
    count = len(load_dataset(dataset).train_targets)
    return tuple(sorted({max(1, count // 4), max(1, count // 2), count}))


@dataclass
class Comparison:
    """The runs of a comparison, collected as they end.

    Attributes:
        common: the arguments of ``RunConfig`` that are the same for all runs.
        say: called with each line of progress.
        runs: a row for each run, see ``_row``.
        skipped: a row for each run without a result, with the reason; ``failed`` if it started.
        loading: a row for each number of training samples: seconds until a rank has them.
    """

    contenders: list[Contender]
    settings: list[Setting]
    common: dict[str, Any]
    say: Callable[[str], None]
    runs: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    loading: list[dict[str, Any]] = field(default_factory=list)

    def check(self) -> None:
        """Raise ValueError, before anything runs, for settings with which no run could start."""
        config = RunConfig(**self.common)
        check_names(config, NOTHING)
        make_strategy(config)
        most = max(setting.train_size for setting in self.settings)
        load_dataset(self.common["dataset"], train_size=most)
        for setting in self.settings:
            RunConfig(**self.common, **asdict(setting))

    def record(self, config: dict[str, Any]) -> dict[str, Any]:
        """Everything that ``labkit compare --json`` keeps; ``config`` goes to its settings."""
        rates = {"lr": RunConfig().lr, "momentum": 0.9}
        return {
            "config": self.common | rates | config,
            "contenders": [asdict(one) for one in self.contenders],
            "settings": [asdict(setting) for setting in self.settings],
            "runs": self.runs,
            "skipped": self.skipped,
            "loading": self.loading,
            **machine(),
        }

    def prepare(self) -> None:
        """Prepare the launch of ranks, and time in turns how long one takes to load samples."""
        warm_up()
        sizes = sorted({setting.train_size for setting in self.settings})
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(_LOADS + 1):
            for size in sizes:
                config = RunConfig(**self.common, train_size=size)
                begun_s = time.perf_counter()
                samples_for(config, NOTHING)
                seconds[size].append(time.perf_counter() - begun_s)
        # The first one reads the files into the system's memory.
        self.loading = [
            {"train_size": size, "seconds": rounded(repeats[1:])}
            for size, repeats in seconds.items()
        ]

    def run(self, repeats: int | None, budget_s: float) -> None:
        """Run everything ``repeats`` times, or as often as fits into ``budget_s``.

        Without a number of repeats, every setting runs once while there is time, then again, up
        to ``MOST_REPEATS`` times, as long as its last duration still fits.
        """
        started_s = time.perf_counter()
        took_s = dict.fromkeys(self.settings, 0.0)
        for repeat in range(repeats or MOST_REPEATS):
            for setting in self.settings:
                left_s = budget_s - (time.perf_counter() - started_s)
                if repeats is None and took_s[setting] >= left_s:
                    if repeat == 0:
                        self._skip("all contenders", setting, "the time budget was used up")
                    continue
                begun_s = time.perf_counter()
                self._repeat(setting, repeat)
                took_s[setting] = time.perf_counter() - begun_s
                self.say(f"repeat {repeat + 1}, {setting.text()}: {took_s[setting]:.0f} s")

    def _repeat(self, setting: Setting, repeat: int) -> None:
        """Run each contender once, and compare it with ``single`` where that takes part."""
        taking_part = [one for one in self.contenders if self._takes_part(one, setting)]
        first = repeat % max(1, len(taking_part))
        results: dict[str, tuple[dict, TrainResult]] = {}
        for contender in taking_part[first:] + taking_part[:first]:
            result = self._run(contender, setting, repeat)
            if result is not None:
                row = _row(contender, self.settings.index(setting), repeat, result)
                self.runs.append(row)
                results[contender.name] = row, result
        if SINGLE in results:
            for row, result in results.values():
                far = result.difference_from(results[SINGLE][1])
                row["difference_from_single"] = far if math.isfinite(far) else None

    def _takes_part(self, contender: Contender, setting: Setting) -> bool:
        # One device does not depend on the world size, so it runs only at that of the main one.
        main = self.settings[0]
        if contender.name == SINGLE:
            return setting == main or setting.world_size == main.world_size
        left_out = {(row["contender"], row["world_size"]) for row in self.skipped}
        return (contender.name, setting.world_size) not in left_out

    def _run(self, contender: Contender, setting: Setting, repeat: int) -> TrainResult | None:
        common = self.common | asdict(setting)
        common["seed"] += repeat
        try:
            return train_run(contender.config(**common), timeout_s=_TIMEOUT_S)
        except (ValueError, WorkerError) as error:
            # A technique refuses what it cannot do by ValueError, before a rank starts.
            reason = str(error).strip().splitlines()[0]
            self._skip(contender.name, setting, reason, failed=isinstance(error, WorkerError))
        return None

    def _skip(self, name: str, setting: Setting, reason: str, *, failed: bool = False) -> None:
        row = {"contender": name, **asdict(setting), "reason": reason, "failed": failed}
        self.skipped.append(row)
        self.say(f"{'failed' if failed else 'skipped'}: {name}, {setting.text()}: {reason}")


def _numbers(epoch: dict[str, Any]) -> dict[str, float | None]:
    """An epoch's numbers; its phases are recorded by role."""
    return {key: short(value) for key, value in epoch.items() if key != "phases_s"}


def _row(contender: Contender, setting: int, repeat: int, result: TrainResult) -> dict[str, Any]:
    """The row of the record on one run; ``setting`` is the index in the record's list."""
    return {
        "contender": contender.name,
        "setting": setting,
        "repeat": repeat,
        "epochs": [_numbers(row) for row in result.epochs],
        "phases_s": phases_by_role(result.trace, result.config.epochs),
        "epoch_phases_s": epochs_by_role(result.trace, [row["seconds"] for row in result.epochs]),
        "bytes_sent": result.bytes_sent,
        "messages": result.messages,
        "peak_memory": as_dicts(result.peak_memory),
        "replicas_agree": result.replicas_agree,
        "note": result.notes.get("note"),
    }
