"""``labkit bench``: our all-reduces against gloo and NCCL, in turns in one run.

Beside the seconds stands the alpha-beta model, fitted to messages between as many ranks.
"""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from labkit.costs.link import Link, all_reduce_seconds, crossover_bytes
from labkit.engine.devices import check_world_size, plan
from labkit.engine.runtime.launch import run
from labkit.training.measured import measure_link
from labkit.units import check_integer, format_bytes, format_number, format_seconds
from workbook.measure.all_reduce import LIMIT, Guest, measure
from workbook.measure.record import Spread, Table, machine, ratios, rounded, write
from workbook.measure.turns import slowest

if TYPE_CHECKING:
    from workbook.plots.figure import CaptionedFigure

WORLD_SIZES = (2, 4)
SIZES_BYTES = (2**10, 2**12, 2**16, 2**20, 2**22, 2**24, 2**26)
REPEATS = 30
_TIMEOUT_S = 1800
_MODELED = ("naive", "tree", "ring")
_REFERENCES = ("gloo", "MPI", "DeepSpeed", "NCCL")
# The first two are those whose crossing is drawn; more curves than these hide each other.
_DRAWN = ("tree", "ring", "fast", *_REFERENCES)


@dataclass(frozen=True)
class Result:
    """Seconds of all-reduces that took turns, and what stands beside them.

    Attributes:
        seconds: ``{size in bytes: {contender: [seconds of each repeat]}}``, of the slowest rank.
        link: what messages cost between as many ranks.
    """

    world_size: int
    seconds: Mapping[int, Mapping[str, list[float]]]
    link: Link

    def rows(self) -> list[dict[str, Any]]:
        """A row of the record for each size and contender.

        ``ratio_to``: the other's time / this one's, repeat by repeat; above 1 this one is faster.
        ``share_of_limit``: the time of a copy / this one's.
        """
        rows = []
        for size, seconds_by_name in self.seconds.items():
            limit_s = median(seconds_by_name[LIMIT])
            for name, repeats_s in seconds_by_name.items():
                ratio_to = {}
                for other in _REFERENCES:
                    if other in seconds_by_name:
                        ratio = Spread.of(ratios(seconds_by_name[other], repeats_s))
                        ratio_to[other] = asdict(ratio)
                model_s = None
                if name in _MODELED:
                    model_s = self.model_s(name, size)
                rows.append(
                    {
                        "world_size": self.world_size,
                        "size_bytes": size,
                        "contender": name,
                        "seconds": rounded(repeats_s),
                        "time_s": asdict(Spread.of(repeats_s)),
                        "ratio_to": ratio_to,
                        "share_of_limit": limit_s / median(repeats_s),
                        "model_s": model_s,
                    }
                )
        return rows

    def model_s(self, name: str, size: int) -> float:
        return all_reduce_seconds(name, size, self.world_size, self.link)

    def crossover_bytes(self) -> float:
        return crossover_bytes(self.world_size, self.link)

    def __str__(self) -> str:
        rows = self.rows()
        references = list(rows[0]["ratio_to"])
        heads = ["size", "contender", "time", *(f"against {name}" for name in references)]
        heads += ["share_of_limit", "model"]
        lines = []
        for row in rows:
            cells = [format_bytes(row["size_bytes"]), row["contender"]]
            cells.append(Spread(**row["time_s"]).text(format_seconds))
            for name in references:
                cells.append(Spread(**row["ratio_to"][name]).text(format_number))
            cells.append(format_number(row["share_of_limit"]))
            model = ""
            if row["model_s"] is not None:
                model = format_seconds(row["model_s"])
            cells.append(model)
            lines.append(tuple(cells))
        overtakes = "never"
        if math.isfinite(self.crossover_bytes()):
            overtakes = format_bytes(self.crossover_bytes())
        notes = (str(self.link), f"The ring overtakes the tree by the formula: {overtakes}.")
        title = f"All-reduce of float32 in place, {self.world_size} ranks, in turns"
        repeats = f"median of {len(rows[0]['seconds'])} repeats (quartiles)"
        against = "against: the other's time / this one's, above 1 this one is faster"
        return f"{title}\n{repeats}; {against}\n\n{Table(tuple(heads), tuple(lines), notes)}\n"

    def figure(self) -> "CaptionedFigure":
        from workbook.plots import size_curves

        curves: dict[str, dict[int, list[float]]] = {}
        for size, seconds_by_name in self.seconds.items():
            for name in _DRAWN:
                if name in seconds_by_name:
                    curves.setdefault(name, {})[size] = seconds_by_name[name]
        models = {}
        for name in ("tree", "ring"):
            models[name] = {size: self.model_s(name, size) for size in self.seconds}
        where = "gloo over TCP, the others in shared memory"
        title = f"All-reduce on {self.world_size} ranks ({where})"
        if "NCCL" in curves:
            title = f"All-reduce on {self.world_size} GPUs"
        return size_curves(curves, models, self.crossover_bytes(), title=title)


def bench_all_reduce(
    world_size: int,
    sizes_bytes: Sequence[int],
    repeats: int,
    device_options: Mapping[str, Any],
    guests: Mapping[str, Guest] | None = None,
) -> Result:
    """Time all available all-reduces on tensors of these sizes, multiples of 4.

    ``device_options``: ``device`` and ``devices`` as in ``labkit.run``. NCCL takes part where each
    rank has a GPU. ``guests`` are additional contenders by name: ``tools/bench_guests.py`` adds
    MPI and DeepSpeed.
    """
    link = measure_link(world_size, "exchange", gamma=True, **device_options)
    result = run(
        measure,
        sizes_bytes,
        repeats,
        dict(guests or {}),
        world_size=world_size,
        timeout_s=_TIMEOUT_S,
        **device_options,
    )
    return Result(world_size, slowest(result.values), link)


def main(
    world_sizes: Sequence[int] = WORLD_SIZES,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    repeats: int = REPEATS,
    device: str = "auto",
    devices: Sequence[str] | None = None,
    json_path: str | None = None,
    figure_path: str | None = None,
    words: Sequence[str] = (),
) -> int:
    """Run the bench on each number of ranks; print, record and draw the results.

    The record has hardware, versions and the command's ``words``. Returns the exit status.

    Raises:
        ValueError: before anything runs, for settings with which no bench could run.
        OutputError: after the runs, a file could not be written.
    """
    check_integer("repeats", repeats)
    for world_size in world_sizes:
        check_integer("the world size of a bench", world_size, least=2)
        check_world_size(world_size)
        plan(world_size, device, devices=devices)
    for size in sizes_bytes:
        if size < 4 or size % 4:
            raise ValueError(f"{size} bytes do not divide into float32: give a multiple of 4")
    if figure_path and Path(figure_path).suffix not in (".png", ".svg"):
        raise ValueError(f"cannot draw {figure_path}: a figure is saved as .png or .svg")
    options = {"device": device, "devices": devices}
    config = {"world_sizes": world_sizes, "sizes_bytes": sizes_bytes, "repeats": repeats}
    record = {"command": shlex.join(["labkit", *words]), "config": config | options}
    results = (bench_all_reduce(count, sizes_bytes, repeats, options) for count in world_sizes)
    show(results, record, json_path, figure_path)
    return 0


def show(
    results: Iterable[Result],
    record: dict[str, Any],
    json_path: str | None = None,
    figure_path: str | None = None,
) -> None:
    """Print each result as soon as it is there; then write all of them, and their figures.

    What is there is written also if the bench is stopped before its end. ``record`` is the
    record's first part: at least ``command`` and ``config``. Several figures go to
    ``FILE_2_ranks.png`` each.
    """
    shown = []
    rows: list[dict[str, Any]] = []
    try:
        for result in results:
            print(result, flush=True)
            shown.append(result)
            rows += result.rows()
    finally:
        if rows and json_path:
            write(record | {"rows": rows} | machine(), json_path)
        if figure_path:
            for result in shown:
                path = Path(figure_path)
                if len(shown) > 1:
                    path = path.with_stem(f"{path.stem}_{result.world_size}_ranks")
                print(f"figure: {result.figure().save(path)}")
