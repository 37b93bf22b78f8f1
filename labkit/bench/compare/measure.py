"""Running the contenders in turns, within a budget of time.

A repeat goes through all settings, and within a setting through all contenders, each repeat
beginning with another one: what else the machine does meets all of them alike, and the ratio
within a repeat is what counts. Repeat r of everybody uses seed K + r.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from labkit.bench.compare.contenders import SINGLE, Contender
from labkit.errors import WorkerError
from labkit.trace import Span, Trace
from labkit.training.result import TrainResult
from labkit.training.train_run import train_run
from labkit.units import format_count

# A run that takes longer is not going to end.
_TIMEOUT_S = 300
MOST_REPEATS = 5
# The first epoch is warm-up and two more make an epoch's time.
_EPOCHS_FOR_TIME = 3


@dataclass(frozen=True)
class Setting:
    """What all contenders are given alike."""

    world_size: int
    train_size: int
    batch_size: int
    epochs: int

    def text(self) -> str:
        ranks = format_count(self.world_size, "rank")
        return f"{ranks}, {self.train_size} samples, batches of {self.batch_size}"


def settings_of(
    world_sizes: tuple[int, ...],
    train_sizes: tuple[int, ...],
    batch_sizes: tuple[int, ...],
    epochs: int,
    units: int,
) -> list[Setting]:
    """The main setting first, then each that differs from it in one thing, once.

    Args:
        world_sizes: the main one is the largest with a core (or GPU) for each rank.
        train_sizes: the main one is the largest.
        batch_sizes: the main one is that in the middle.
        epochs: of the main setting; the others need time alone, and run three at most.
        units: cores or GPUs.
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


class Comparison:
    """All runs, as they come in.

    Attributes:
        runs: a row for each run, see ``_row``.
        skipped: what was not run, and why; ``failed`` where it began and broke off.
    """

    def __init__(
        self,
        contenders: list[Contender],
        settings: list[Setting],
        common: dict[str, Any],
        say: Callable[[str], None],
    ):
        self.contenders = contenders
        self.settings = settings
        self.common = common
        self.say = say
        self.runs: list[dict] = []
        self.skipped: list[dict] = []
        self._left_out: set[tuple[str, int]] = set()

    def run(self, repeats: int | None, budget_s: float) -> None:
        """Run everything ``repeats`` times, or as often as fits into ``budget_s``.

        Without a number of repeats, every setting gets one while there is time, then more, up to
        ``MOST_REPEATS``, as long as its last duration still fits.
        """
        started_s = time.perf_counter()
        took_s = dict.fromkeys(self.settings, 0.0)
        for repeat in range(repeats or MOST_REPEATS):
            for setting in self.settings:
                left_s = budget_s - (time.perf_counter() - started_s)
                if repeats is None and took_s[setting] >= left_s:
                    if repeat == 0:
                        self._no_time_for(setting)
                    continue
                begun_s = time.perf_counter()
                self._repeat(setting, repeat)
                took_s[setting] = time.perf_counter() - begun_s
                self.say(f"repeat {repeat + 1}, {setting.text()}: {took_s[setting]:.0f} s")

    def _repeat(self, setting: Setting, repeat: int) -> None:
        """One run of each contender, compared with one device where that takes part."""
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
        # One device has no number of ranks: it runs once for all of them, in the main setting.
        main = self.settings[0]
        if contender.name == SINGLE:
            return setting == main or setting.world_size == main.world_size
        return (contender.name, setting.world_size) not in self._left_out

    def _run(self, contender: Contender, setting: Setting, repeat: int) -> TrainResult | None:
        common = self.common | asdict(setting)
        common["seed"] += repeat
        try:
            return train_run(contender.config(**common), timeout_s=_TIMEOUT_S)
        except (ValueError, WorkerError) as error:
            # What a technique cannot do it refuses before a rank starts, by ValueError.
            failed = isinstance(error, WorkerError)
            self._leave_out(contender, setting, str(error), failed=failed)
        return None

    def _no_time_for(self, setting: Setting) -> None:
        reason = "the budget of time was used up"
        row = {"contender": "everybody", **asdict(setting), "reason": reason, "failed": False}
        self.skipped.append(row)
        self.say(f"skipped: {setting.text()}: {reason}")

    def _leave_out(
        self, contender: Contender, setting: Setting, reason: str, *, failed: bool
    ) -> None:
        self._left_out.add((contender.name, setting.world_size))
        reason = reason.strip().splitlines()[0]
        row = {"contender": contender.name, **asdict(setting), "reason": reason, "failed": failed}
        self.skipped.append(row)
        what = "failed" if failed else "skipped"
        ranks = format_count(setting.world_size, "rank")
        self.say(f"{what}: {contender.name} on {ranks}: {reason}")


def _row(contender: Contender, setting: int, repeat: int, result: TrainResult) -> dict:
    """What the record keeps of a run; ``setting`` is the index in the record's list."""
    return {
        "contender": contender.name,
        "setting": setting,
        "repeat": repeat,
        "epochs": [{key: _short(value) for key, value in row.items()} for row in result.epochs],
        "phases_s": phases_by_role(result.trace, result.config.epochs),
        "bytes_sent": result.bytes_sent,
        "messages": result.messages,
        "replicas_agree": result.replicas_agree,
        "note": result.notes.get("note"),
    }


def phases_by_role(trace: Trace, epochs: int) -> dict[str, dict[str, float]]:
    """Seconds an epoch by kind of span, by what a rank is: a ``worker`` computes a share of the
    batch, a ``stage`` a part of the model, a ``server`` nothing. Means over the ranks of a role.

    Launch, evaluation and the first epoch (warm-up) are left out; where ranks do not keep step,
    no epoch ends on all of them at once, and the mean is over all epochs.
    """
    by_role: dict[str, list[dict[str, float]]] = {}
    for rank in trace.ranks:
        seconds = _epoch_seconds(trace.of(rank), epochs)
        by_role.setdefault(_role(seconds), []).append(seconds)
    return {role: _means(rows) for role, rows in sorted(by_role.items(), reverse=True)}


def _role(seconds: dict[str, float]) -> str:
    if seconds.get("compute"):
        return "worker"
    return "stage" if seconds.keys() & {"forward", "backward"} else "server"


def _epoch_seconds(spans: list[Span], epochs: int) -> dict[str, float]:
    windows = epoch_windows(spans)
    counted = windows[1:] or windows if len(windows) == epochs else windows
    count = len(counted) if len(windows) == epochs else epochs
    seconds: dict[str, float] = {}
    for span in spans:
        if any(start_s <= span.start_s < end_s for start_s, end_s in counted):
            seconds[span.kind] = seconds.get(span.kind, 0.0) + span.duration_s / count
    return seconds


def epoch_windows(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """(start, end) of each stretch of training in one rank's spans, in the order of time.

    It begins with a batch's data and ends where an evaluation begins, or with the last span. A
    rank that loads no data serves from its first span on.
    """
    spans = list(spans)
    opens = {"data"} & {span.kind for span in spans} or {span.kind for span in spans}
    windows, start_s = [], None
    for span in spans:
        if span.kind == "evaluate":
            windows += [] if start_s is None else [(start_s, span.start_s)]
            start_s = None
        elif start_s is None and span.kind in opens:
            start_s = span.start_s
    if start_s is not None:
        windows.append((start_s, max(span.end_s for span in spans)))
    return windows


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    kinds = sorted({kind for row in rows for kind in row})
    return {kind: _short(sum(row.get(kind, 0.0) for row in rows) / len(rows)) for kind in kinds}


def _short(value: float) -> float | None:
    """Six significant digits: more is noise, and makes a record hard to read. NaN is None."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
