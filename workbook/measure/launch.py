"""``labkit bench launch``: the time of a run, against PyTorch's ``multiprocessing.spawn``."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from labkit.collectives import ring_all_reduce
from labkit.comm.comm import Comm
from labkit.comm.processes import loopback
from labkit.devices import Plan
from labkit.runtime.launch import run
from labkit.units import format_seconds
from workbook.measure.record import Result
from workbook.measure.spread import ratios
from workbook.measure.turns import Where, check_settings, repeat_turns


@dataclass(frozen=True)
class LaunchResult(Result):
    """Two ways to launch a run, in turns: the seconds of each repeat of ``ours`` and ``other``."""

    name: str
    world_size: int
    ours_s: list[float]
    other_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """other / ours of each pair: above 1, ours is faster."""
        return ratios(self.other_s, self.ours_s)

    def __str__(self) -> str:
        ratios = self.ratios
        return (
            f"{self.name}, {self.world_size} ranks: {_range(self.ours_s)} against "
            f"{_range(self.other_s)}; {statistics.median(ratios):.1f} times as fast "
            f"({min(ratios):.1f} to {max(ratios):.1f} in {len(ratios)} pairs)"
        )

    def record(self) -> dict[str, Any]:
        return {"comparisons": [asdict(self) | {"ratios": self.ratios}]}


def bench_launch(
    world_sizes: tuple[int, ...] = (2, 4),
    repeats: int = 3,
    device: str = "auto",
    devices: tuple[str, ...] | None = None,
) -> Iterator[LaunchResult]:
    """Time a small run, by ``labkit.run`` and by ``torch.multiprocessing.spawn``.

    Both start the ranks, join them to a group (NCCL where each rank has a GPU, else gloo), sum one
    number over them, and end them. The start of our forkserver, which only the first run of a
    program waits for, is left out.

    Args:
        world_sizes: of the runs; one result for each.
        repeats: of each run.
        device, devices: see ``labkit.run``.

    Raises:
        ValueError: an impossible world size, device or number of repeats, before anything runs.
    """
    check_settings("a launch", world_sizes, repeats, least=1)
    where = Where(device, devices)
    for world_size in world_sizes:
        where.plan(world_size)
    return _compare(world_sizes, repeats, where)


def _compare(world_sizes: tuple[int, ...], repeats: int, where: Where) -> Iterator[LaunchResult]:
    run_ours(1, where)
    for world_size in world_sizes:
        ways = {"ours_s": run_ours, "other_s": run_spawned}
        turns = {name: partial(_seconds, way, world_size, where) for name, way in ways.items()}
        yield LaunchResult("launch", world_size, **repeat_turns(turns, repeats))


def run_ours(world_size: int, where: Where) -> None:
    result = run(_sum_one, world_size=world_size, **where.settings())
    assert result.values == [float(world_size)] * world_size


def run_spawned(world_size: int, where: Where) -> None:
    with tempfile.TemporaryDirectory(prefix="labkit-spawn-") as folder:
        arguments = world_size, f"{folder}/store", where.plan(world_size)
        torch.multiprocessing.spawn(_spawned_rank, arguments, world_size)


def _sum_one(comm: Comm) -> float:
    return ring_all_reduce(comm, torch.ones(1, device=comm.device)).item()


def _spawned_rank(rank: int, world_size: int, path: str, chosen: Plan) -> None:
    # A store in a private file: PyTorch's TCP store would listen on every interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    store = dist.FileStore(path, world_size)
    device = torch.device(chosen.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(chosen.backend, store=store, rank=rank, world_size=world_size)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == world_size
    dist.destroy_process_group()


def _seconds(function: Callable[[int, Where], None], world_size: int, where: Where) -> float:
    start_s = time.perf_counter()
    function(world_size, where)
    return time.perf_counter() - start_s


def _range(seconds: list[float]) -> str:
    middle = format_seconds(statistics.median(seconds))
    return f"{middle} ({format_seconds(min(seconds))} to {format_seconds(max(seconds))})"
