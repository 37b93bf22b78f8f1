"""``labkit bench placement``: the costs of the cuts of VGG16, measured and predicted.

It measures one hop between two stages; the hops of every named placement
(``placement.VGG16_SPLITS``); and the step of every single cut into two stages, with and without a
pipeline (see ``single_cuts``).
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from labkit.bench.model_step import SHAPE
from labkit.bench.record import Figures, Result
from labkit.bench.single_cuts import measure_cuts
from labkit.bench.spread import Spread, ratios, rounded, table
from labkit.bench.turns import on_ranks, slowest, take_turns, timed
from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.costs.link import Link
from labkit.placement.planner import predict_split
from labkit.placement.vgg16_splits import VGG16_SPLITS
from labkit.training.measured_link import measure_link
from labkit.training.split_run import measure_profile, measure_split
from labkit.units import check_integer, format_bytes, format_number, format_seconds

MODEL = "vgg16"
BATCH_SIZES = (8, 32)
BACKBONE = 31  # layers of the feature extractor, which the reference project froze
SCATTER_BATCH, MICRO_BATCHES = 16, 4
SIZES = tuple(2**k for k in (18, 20, 22, 24, 26))
_BUDGET_S = 20.0
SHARED, GLOO, COPY = "shared memory", "gloo", "a plain copy"


@dataclass(frozen=True)
class HopTimes(Result):
    """Times of one hop: ``{bytes: {transport, or "a plain copy": [seconds of each repeat]}}``."""

    seconds: dict[int, dict[str, list[float]]]

    def against_shared(self, num_bytes: int, other: str) -> Spread:
        """The other's time / that in shared memory, repeat by repeat: above 1 it is slower."""
        found = self.seconds[num_bytes]
        return Spread.of(ratios(found[other], found[SHARED]))

    def __str__(self) -> str:
        rows = [
            [
                format_bytes(size),
                *(Spread.of(found[way]).text(format_seconds) for way in (SHARED, GLOO, COPY)),
                *(self.against_shared(size, o).text(format_number) for o in (GLOO, COPY)),
            ]
            for size, found in self.seconds.items()
        ]
        header = ["activation", SHARED, GLOO, COPY, "gloo / shared", "copy / shared"]
        return f"One hop between two stages, median (quartiles)\n\n{table(header, rows)}\n"

    def record(self) -> dict[str, list[dict]]:
        rows = [
            {
                "num_bytes": size,
                **{name: asdict(Spread.of(times)) for name, times in found.items()},
                "gloo_to_shared": asdict(self.against_shared(size, GLOO)),
                "copy_to_shared": asdict(self.against_shared(size, COPY)),
            }
            for size, found in self.seconds.items()
        ]
        return {"transport": rows}


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
        from labkit.plots.communication_time import communication_time

        return {"hops": communication_time([r for r in self.rows if r["trained"] == "all"])}


def bench_placement(repeats: int = 6) -> Iterator[Result]:
    """Measure the hops and cuts of VGG16 on the CPU, with one process per stage.

    Args:
        repeats: counted steps of each placement; each single cut gets half as many, and each cut
            in the play-off of the best ones about three times as many.

    Raises:
        ValueError: an impossible number of repeats, before anything runs.
        WorkerError: a stage failed.
    """
    check_integer("repeats", repeats)
    return _results(repeats)


def _results(repeats: int) -> Iterator[Result]:
    yield measure_transport(repeats * 5)
    link = measure_link(device="cpu")
    yield measure_hops(link, repeats)
    profile = measure_profile(MODEL, batch_size=SCATTER_BATCH, input_shape=SHAPE, device="cpu")
    for micro_batches in (1, MICRO_BATCHES):
        yield measure_cuts(profile, link, micro_batches, max(1, repeats // 2))


def measure_transport(repeats: int, sizes: tuple[int, ...] = SIZES) -> HopTimes:
    """Time, by size in bytes: a hop in shared memory, a hop over gloo, a copy in one process."""
    return HopTimes(slowest(on_ranks(_hop_both_ways, repeats, sizes, world_size=2)))


def _hop_both_ways(comm: Comm, repeats: int, sizes: tuple[int, ...]) -> dict[int, dict]:
    gloo = TorchTransport("gloo", comm.device)
    ways = {SHARED: comm, GLOO: Comm(comm.rank, 2, comm.device, gloo)}
    seconds = {}
    for size in sizes:
        tensor = torch.ones(size // 4)
        actions = {name: partial(_hop, way, tensor) for name, way in ways.items()}
        actions[COPY] = partial(_copy, comm, tensor, torch.empty_like(tensor))
        turns = {name: partial(timed, comm, action) for name, action in actions.items()}
        seconds[size] = take_turns(comm, turns, repeats, _BUDGET_S)
    return seconds


def _hop(comm: Comm, tensor: torch.Tensor) -> None:
    if comm.rank == 0:
        comm.send(tensor, 1)
    else:
        comm.recv(tensor, 0)


def _copy(comm: Comm, tensor: torch.Tensor, landing: torch.Tensor) -> None:
    if comm.rank == 0:
        landing.copy_(tensor)


def measure_hops(link: Link, repeats: int) -> PlacementHops:
    """Measure the hops of every placement, with all layers trained and with a frozen backbone."""
    # Not at the top: every rank of a bench imports this module, and does not need matplotlib.
    from labkit.plots.communication_time import hop_rows

    placements = {name: points for name, points in VGG16_SPLITS.items() if points}
    rows: list[dict[str, Any]] = []
    for batch_size in BATCH_SIZES:
        batch = {"batch_size": batch_size, "input_shape": SHAPE, "device": "cpu"}
        profile = measure_profile(MODEL, **batch, repeats=1)
        for (name, points), frozen in itertools.product(placements.items(), (0, BACKBONE)):
            predicted = predict_split(profile, points, link, frozen=frozen)
            measured = measure_split(MODEL, points, **batch, frozen=frozen, steps=repeats)
            trained = {"trained": "head" if frozen else "all"}
            rows += [row | trained for row in hop_rows(name, measured, predicted)]
    return PlacementHops(rows)
