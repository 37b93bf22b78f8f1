"""``labkit bench``: our all-reduces against gloo and NCCL, in turns in one run.

In the figure the alpha-beta model stands beside them, fitted to messages between as many ranks.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.costs.link import Link, all_reduce_seconds, crossover_bytes
from labkit.engine.devices import check_world_size, plan
from labkit.engine.runtime.launch import run
from labkit.training.measured import measure_link
from labkit.units import check_integer, format_bytes, format_number, format_seconds
from workbook.measure.all_reduce import Guest, measure
from workbook.measure.record import Spread, Table, machine, ratios, rounded, write
from workbook.measure.turns import slowest

if TYPE_CHECKING:
    from workbook.plots.figure import CaptionedFigure

SIZES_BYTES = (2**10, 2**12, 2**16, 2**20, 2**22, 2**24, 2**26)
_TIMEOUT_S = 1800
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
        """
        rows = []
        for size, seconds_by_name in self.seconds.items():
            for name, repeats_s in seconds_by_name.items():
                row: dict[str, Any] = {"world_size": self.world_size, "size_bytes": size}
                row["contender"] = name
                row["seconds"] = rounded(repeats_s)
                row["time_s"] = asdict(Spread.of(repeats_s))
                row["ratio_to"] = {}
                for other in _REFERENCES:
                    if other in seconds_by_name:
                        ratio = Spread.of(ratios(seconds_by_name[other], repeats_s))
                        row["ratio_to"][other] = asdict(ratio)
                rows.append(row)
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        references = list(rows[0]["ratio_to"])
        lines = []
        for row in rows:
            cells = [format_bytes(row["size_bytes"]), row["contender"]]
            cells.append(Spread(**row["time_s"]).text(format_seconds))
            for name in references:
                cells.append(Spread(**row["ratio_to"][name]).text(format_number))
            lines.append(tuple(cells))
        heads = ("size", "contender", "time", *(f"against {name}" for name in references))
        title = f"All-reduce of float32 in place, {self.world_size} ranks, in turns"
        repeats = f"median of {len(rows[0]['seconds'])} repeats (quartiles)"
        against = "against: the other's time / this one's, above 1 this one is faster"
        table = Table(heads, tuple(lines), (str(self.link),))
        return f"{title}\n{repeats}; {against}\n\n{table}\n"

    def figure(self) -> "CaptionedFigure":
        from workbook.plots import size_curves

        curves: dict[str, dict[int, list[float]]] = {}
        models: dict[str, dict[int, float]] = {"tree": {}, "ring": {}}
        for size, seconds_by_name in self.seconds.items():
            for name in _DRAWN:
                if name in seconds_by_name:
                    curves.setdefault(name, {})[size] = seconds_by_name[name]
            for name, model in models.items():
                model[size] = all_reduce_seconds(name, size, self.world_size, self.link)
        where = "ranks (gloo over TCP, the others in shared memory)"
        if "NCCL" in curves:
            where = "GPUs"
        crossover = crossover_bytes(self.world_size, self.link)
        title = f"All-reduce on {self.world_size} {where}"
        return size_curves(curves, models, crossover, title=title)


def bench_all_reduce(
    world_size: int,
    sizes_bytes: Sequence[int],
    repeats: int,
    device: str,
    guests: Mapping[str, Guest] | None = None,
) -> Result:
    """Time all available all-reduces on tensors of these sizes, multiples of 4.

    NCCL takes part where each rank has a GPU. ``guests`` are additional contenders by name:
    ``tools/bench_guests.py`` adds MPI and DeepSpeed.
    """
    link = measure_link(world_size, "exchange", gamma=True, device=device)
    options = {"world_size": world_size, "device": device, "timeout_s": _TIMEOUT_S}
    result = run(measure, sizes_bytes, repeats, dict(guests or {}), **options)
    return Result(world_size, slowest(result.values), link)


def main(
    world_sizes: Sequence[int] = (2, 4),
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    repeats: int = 30,
    device: str = "auto",
    json_path: str | None = None,
    figure_path: str | None = None,
    words: Sequence[str] = (),
) -> int:
    """Run the bench on each number of ranks; return the exit status.

    ``words`` are the command line, for the record.

    Raises:
        ValueError: before anything runs, for settings with which no bench could run.
        OutputError: after a run, a file could not be written.
    """
    check_integer("repeats", repeats)
    for world_size in world_sizes:
        check_integer("the world size of a bench", world_size, least=2)
        check_world_size(world_size)
        plan(world_size, device)
    for size in sizes_bytes:
        if size < 4 or size % 4:
            raise ValueError(f"{size} bytes do not divide into float32: give a multiple of 4")
    if figure_path and Path(figure_path).suffix not in (".png", ".svg"):
        raise ValueError(f"cannot draw {figure_path}: a figure is saved as .png or .svg")
    config = {
        "world_sizes": world_sizes,
        "sizes_bytes": sizes_bytes,
        "repeats": repeats,
        "device": device,
    }
    record = {"command": shlex.join(["labkit", *words]), "config": config}
    results = (bench_all_reduce(count, sizes_bytes, repeats, device) for count in world_sizes)
    show(results, record, json_path, figure_path)
    return 0


def show(
    results: Iterable[Result],
    record: dict[str, Any],
    json_path: str | None = None,
    figure_path: str | None = None,
) -> None:
    """Print, record and draw each result as soon as it is there; a stopped bench has all before.

    ``record`` is the record's first part: at least ``command`` and ``config``. Figures go to
    ``FILE_2_ranks.png``, by the number of ranks.
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        print(result, flush=True)
        rows += result.rows()
        if json_path:
            write(record | {"rows": rows} | machine(), json_path)
        if figure_path:
            path = Path(figure_path)
            path = path.with_stem(f"{path.stem}_{result.world_size}_ranks")
            print(f"figure: {result.figure().save(path)}")
