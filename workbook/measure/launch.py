"""``labkit bench launch``: the time of a run, against PyTorch's ``multiprocessing.spawn``.

Both start the ranks, join them to a group (NCCL where each rank has a GPU, else gloo), sum one
number over them, and end them. The start of our forkserver, which only the first run of a program
waits for, is left out.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing

from labkit.collectives import ring_all_reduce
from labkit.comm.comm import Comm
from labkit.comm.shared_memory import loopback
from labkit.devices import Plan, plan
from labkit.runtime.launch import run
from workbook.measure.record import Result
from workbook.measure.turns import Where, repeat_turns

OURS, THEIRS = "labkit.run", "torch.multiprocessing.spawn"


def bench_launch(world_size: int, repeats: int, where: Where) -> Iterator[Result]:
    """Time a small run, by ``labkit.run`` and by ``torch.multiprocessing.spawn``."""
    _run_ours(1, where)
    ways = {OURS: _run_ours, THEIRS: _run_spawned}
    turns = {name: partial(_seconds, way, world_size, where) for name, way in ways.items()}
    seconds = {"": repeat_turns(turns, repeats)}
    yield Result(f"A run of {world_size} ranks", {"world_size": world_size}, seconds, (THEIRS,))


def _seconds(function: Callable[[int, Where], None], world_size: int, where: Where) -> float:
    start_s = time.perf_counter()
    function(world_size, where)
    return time.perf_counter() - start_s


def _run_ours(world_size: int, where: Where) -> None:
    def sum_one(comm: Comm) -> float:
        return ring_all_reduce(comm, torch.ones(1, device=comm.device)).item()

    result = run(sum_one, world_size=world_size, **where)
    assert result.values == [float(world_size)] * world_size


def _run_spawned(world_size: int, where: Where) -> None:
    with tempfile.TemporaryDirectory(prefix="labkit-spawn-") as folder:
        arguments = world_size, f"{folder}/store", plan(world_size, **where)
        torch.multiprocessing.spawn(_spawned_rank, arguments, world_size)


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
