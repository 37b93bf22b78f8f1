"""``labkit bench placement``: the costs of the cuts of VGG16, measured and predicted.

It measures one hop between two stages; the hops of every named placement
(``placement.VGG16_SPLITS``); and the step of every single cut into two stages, with and without a
pipeline (see ``single_cuts``).
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.costs.link import Link
from labkit.placement.planner import predict_split
from labkit.placement.vgg16_splits import VGG16_SPLITS
from labkit.training.measured import measure_link, measure_profile, measure_split
from labkit.units import check_integer, format_bytes, format_number, format_seconds
from workbook.measure.model_step import SHAPE
from workbook.measure.record import Figures, Result
from workbook.measure.single_cuts import measure_cuts
from workbook.measure.spread import Spread, ratios, rounded, table
from workbook.measure.turns import (
    ON_CPU,
    Where,
    on_ranks,
    process_groups,
    slowest,
    take_turns,
    timed,
)

MODEL = "vgg16"
BATCH_SIZES = (8, 32)
BACKBONE = 31  # layers of the feature extractor, which the reference project froze
SCATTER_BATCH, MICRO_BATCHES = 16, 4
SIZES = tuple(2**k for k in (18, 20, 22, 24, 26))
_BUDGET_S = 20.0
SHARED, GLOO, COPY = "shared memory", "gloo", "a plain copy"
NCCL = "NCCL"


@dataclass(frozen=True)
class HopTimes(Result):
    """Times of one hop: ``{bytes: {way: [seconds of each repeat]}}``.

    The ways are transports (shared memory, gloo and NCCL) and
    a plain copy in one process. The first one is shared memory.
    """

    seconds: dict[int, dict[str, list[float]]]

    def against_shared(self, num_bytes: int, other: str) -> Spread:
        """The other's time / that in shared memory, repeat by repeat: above 1 it is slower."""
        shared_s, *_ = self.seconds[num_bytes].values()
        return Spread.of(ratios(self.seconds[num_bytes][other], shared_s))

    def __str__(self) -> str:
        shared, *others = next(iter(self.seconds.values()))
        rows = [
            [
                format_bytes(size),
                *(Spread.of(times).text(format_seconds) for times in found.values()),
                *(self.against_shared(size, o).text(format_number) for o in others),
            ]
            for size, found in self.seconds.items()
        ]
        header = ["activation", shared, *others, *(f"{_short(o)} / shared" for o in others)]
        return f"One hop between two stages, median (quartiles)\n\n{table(header, rows)}\n"

    def record(self) -> dict[str, list[dict]]:
        rows = [
            {
                "num_bytes": size,
                **{name: asdict(Spread.of(times)) for name, times in found.items()},
                **{
                    f"{_short(other).lower()}_to_shared": asdict(self.against_shared(size, other))
                    for other in list(found)[1:]
                },
            }
            for size, found in self.seconds.items()
        ]
        return {"transport": rows}


def _short(way: str) -> str:
    return "copy" if way == COPY else way


@dataclass(frozen=True)
class PlacementHops(Result):
    """The communication time of the named placements: rows of ``plots.communication_time``."""

    rows: list[dict]

    def __str__(self) -> str:
        header = ["placement", "trained", "cut", "direction", "batch", "bytes", "time", "model"]
        as_they_are = ("placement", "trained", "cut", "direction", "batch_size")
        cells = [
            [
                *(str(row[name]) for name in as_they_are),
                format_bytes(row["num_bytes"]),
                Spread.of(row["seconds"]).text(format_seconds),
                format_seconds(row["model_s"]),
            ]
            for row in self.rows
        ]
        return f"Communication of VGG16's placements, per step\n\n{table(header, cells)}\n"

    def record(self) -> dict[str, list[dict]]:
        return {"hops": [row | {"seconds": rounded(row["seconds"])} for row in self.rows]}

    def figures(self) -> Figures:
        """The hops of the placements in which all layers are trained."""
        from workbook.plots.communication_time import communication_time

        return {"hops": communication_time([r for r in self.rows if r["trained"] == "all"])}


def bench_placement(
    repeats: int = 6, device: str = "auto", devices: tuple[str, ...] | None = None
) -> Iterator[Result]:
    """Measure the hops and cuts of VGG16, with one process per stage.

    On GPUs the hops are timed by CUDA events; placements with more stages than GPUs are measured
    with stages that share one.

    Args:
        repeats: counted steps of each placement; each single cut gets half as many, and each cut
            in the play-off of the best ones about three times as many.
        device, devices: see ``labkit.run``.

    Raises:
        ValueError: an impossible number of repeats or device, before anything runs.
        WorkerError: a stage failed.
    """
    check_integer("repeats", repeats)
    where = Where(device, devices)
    where.plan(2)
    return _results(repeats, where)


def _results(repeats: int, where: Where) -> Iterator[Result]:
    on_gpus: dict[str, Any] = {} if where.kind == "cpu" else {"where": where}
    yield measure_transport(repeats * 5, **on_gpus)
    link = measure_link(**where.settings())
    yield measure_hops(link, repeats, **on_gpus)
    batch: dict[str, Any] = {"batch_size": SCATTER_BATCH, "input_shape": SHAPE}
    profile = measure_profile(MODEL, **batch, **where.settings())
    for micro_batches in (1, MICRO_BATCHES):
        yield measure_cuts(profile, link, micro_batches, max(1, repeats // 2), **on_gpus)


def measure_transport(
    repeats: int, sizes: tuple[int, ...] = SIZES, where: Where = ON_CPU
) -> HopTimes:
    """Time, by size in bytes: a hop over each transport, and a copy in one process."""
    settings = {"world_size": 2, "where": where}
    return HopTimes(slowest(on_ranks(_hop_every_way, repeats, sizes, **settings)))


def _hop_every_way(comm: Comm, repeats: int, sizes: tuple[int, ...]) -> dict[int, dict]:
    def over(backend: str, group: Any = None) -> Comm:
        return Comm(comm.rank, 2, comm.device, TorchTransport(backend, comm.device, group))

    ways = {} if comm.device.type == "cuda" else {SHARED: comm}
    with contextlib.ExitStack() as stack:
        if dist.get_backend() == "nccl":
            ways |= {GLOO: over("gloo", stack.enter_context(process_groups(comm))["gloo"])}
            ways |= {NCCL: over("nccl")}
        else:
            ways |= {GLOO: over("gloo")}
        return {size: _time_hops(comm, ways, repeats, size) for size in sizes}


def _time_hops(
    comm: Comm, ways: dict[str, Comm], repeats: int, size: int
) -> dict[str, list[float]]:
    tensor = torch.ones(size // 4, device=comm.device)
    actions = {name: partial(_hop, way, tensor) for name, way in ways.items()}
    actions[COPY] = partial(_copy, comm, tensor, torch.empty_like(tensor))
    turns = {name: partial(timed, comm, action) for name, action in actions.items()}
    return take_turns(comm, turns, repeats, _BUDGET_S)


def _hop(comm: Comm, tensor: torch.Tensor) -> None:
    if comm.rank == 0:
        comm.send(tensor, 1)
    else:
        comm.recv(tensor, 0)


def _copy(comm: Comm, tensor: torch.Tensor, landing: torch.Tensor) -> None:
    if comm.rank == 0:
        landing.copy_(tensor)


def measure_hops(link: Link, repeats: int, where: Where = ON_CPU) -> PlacementHops:
    """Measure the hops of every placement, with all layers trained and with a frozen backbone."""
    # Not at the top: every rank of a bench imports this module, and does not need matplotlib.
    from workbook.plots.communication_time import hop_rows

    placements = {name: points for name, points in VGG16_SPLITS.items() if points}
    rows: list[dict[str, Any]] = []
    for batch_size in BATCH_SIZES:
        batch: dict[str, Any] = {"batch_size": batch_size, "input_shape": SHAPE}
        batch |= where.settings()
        profile = measure_profile(MODEL, **batch, repeats=1)
        for (name, points), frozen in itertools.product(placements.items(), (0, BACKBONE)):
            predicted = predict_split(profile, points, link, frozen=frozen)
            measured = measure_split(MODEL, points, **batch, frozen=frozen, steps=repeats)
            trained = {"trained": "head" if frozen else "all"}
            rows += [row | trained for row in hop_rows(name, measured, predicted)]
    return PlacementHops(rows)
