"""``labkit bench all-reduce``: our algorithms against gloo, NCCL and MPI, in turns in one run.

Symbols: P ranks, S bytes of one rank's tensor.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import labkit.bench.mpi as mpi
from labkit import devices
from labkit.bench.all_reduce_result import AllReduceResult
from labkit.bench.machine import measure_memory, measure_messages
from labkit.bench.turns import Turn, agree, process_groups, slowest, take_turns, timed
from labkit.collectives import (
    fast_ring_all_reduce,
    naive_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)
from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.runtime.launch import run
from labkit.units import MOST_BYTES, check_integer, format_bytes

SIZES_BYTES = tuple(2**power for power in (10, 12, 16, 20, 22, 24, 26))
# Seconds for the repeats of one size.
_BUDGET_S = 5.0
_TIMEOUT_S = 1800
_KEPT_SPANS = 1000

AllReduce = Callable[[Tensor], object]


def bench_all_reduce(
    world_sizes: tuple[int, ...] = (2, 4),
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
    repeats: int = 50,
    device: str = "auto",
) -> Iterator[AllReduceResult]:
    """Time every all-reduce of float32 that this machine has, one result for each world size.

    The tensors are ordinary ones, not laid into shared memory beforehand. Every turn starts from
    the same values and its result is checked on every rank, so what is timed is right.

    Args:
        world_sizes: of the runs, each at least 2.
        sizes_bytes: S, multiples of 4.
        repeats: at most; large tensors get fewer, at least 5.
        device: ``auto``, ``cpu`` or ``cuda``. On ``cuda`` NCCL takes part where each rank has a
            GPU; on ``cpu`` MPI, where it is installed.

    Raises:
        ValueError: sizes or world sizes that cannot be, before anything runs.
        WorkerError: a contender failed, or its result was wrong.
    """
    check_integer("repeats", repeats)
    check_sizes(sizes_bytes)
    for world_size in world_sizes:
        devices.check_world_size(world_size)
        if world_size < 2:
            raise ValueError(f"an all-reduce takes 2 ranks or more, got world size {world_size}")
    on_gpu = "cuda" in devices.plan(1, device).devices[0]
    return _results(world_sizes, sizes_bytes, repeats, device, on_gpu)


def _results(
    world_sizes: tuple[int, ...],
    sizes_bytes: tuple[int, ...],
    repeats: int,
    device: str,
    on_gpu: bool,
) -> Iterator[AllReduceResult]:
    for world_size in world_sizes:
        found = mpi.Found(missing="its tensors are on the CPU") if on_gpu else mpi.find(world_size)
        result = run(
            measure,
            sizes_bytes,
            repeats,
            bool(found.library),
            world_size=world_size,
            device=device,
            timeout_s=_TIMEOUT_S,
        )
        kind = "cuda" if on_gpu else "cpu"
        yield AllReduceResult.of(slowest(result.values), world_size, kind, found)


def check_sizes(sizes_bytes: tuple[int, ...]) -> None:
    """ValueError unless these are sizes of float32 tensors."""
    for size in sizes_bytes:
        check_integer("a size in bytes", size, least=0, most=MOST_BYTES)
        if size < 4 or size % 4:
            raise ValueError(
                f"{size} bytes are no whole number of float32 elements: give multiples of 4"
            )


def measure(comm: Comm, sizes_bytes: tuple[int, ...], repeats: int, with_mpi: bool) -> dict:
    """On each rank: everything one result needs, as this rank's seconds."""
    over_gloo = _gloo_comm(comm)
    transports = {_transport_name(comm): comm}
    if over_gloo:
        transports["gloo"] = over_gloo
    found = {
        "memory": measure_memory(comm, repeats),
        "messages": measure_messages(comm, transports, repeats=repeats),
    }
    with process_groups(comm) as groups, _mpi_ranks(comm, with_mpi) as mpi_ranks:
        algorithms = contenders(comm, over_gloo, groups)
        found["all_reduce"] = {}
        for number, size in enumerate(sizes_bytes):
            comm.progress(number, len(sizes_bytes), format_bytes(size))
            turns = turns_of(comm, size, algorithms)
            if with_mpi:
                turns["MPI"] = _mpi_turn(comm, size, mpi_ranks)
            found["all_reduce"][size] = take_turns(comm, turns, repeats, _BUDGET_S)
    return found


def _transport_name(comm: Comm) -> str:
    if comm.shares_memory:
        return "shared"
    return dist.get_backend()


def _gloo_comm(comm: Comm) -> Comm | None:
    """The same ranks over gloo; None where the run's own Comm is that already, or has no gloo."""
    if not comm.shares_memory or dist.get_backend() != "gloo":
        return None
    transport = TorchTransport("gloo", comm.device)
    return Comm(comm.rank, comm.world_size, comm.device, transport, keep_spans=_KEPT_SPANS)


@contextlib.contextmanager
def _mpi_ranks(comm: Comm, with_mpi: bool) -> Iterator[mpi.MpiRanks | None]:
    """Rank 0 speaks for all MPI ranks; None on the others."""
    if with_mpi and comm.rank == 0:
        with mpi.started(comm.world_size) as ranks:
            yield ranks
    else:
        yield None


def contenders(
    comm: Comm, over_gloo: Comm | None, groups: dict[str, dist.ProcessGroup]
) -> dict[str, AllReduce]:
    """By name, what reduces a tensor in place."""
    found: dict[str, AllReduce] = {
        "fast ring": lambda tensor: fast_ring_all_reduce(comm, tensor),
        "ring": lambda tensor: ring_all_reduce(comm, tensor),
        "tree": lambda tensor: tree_all_reduce(comm, tensor),
        "naive": lambda tensor: naive_all_reduce(comm, tensor),
    }
    if over_gloo:
        found["ring over gloo"] = lambda tensor: ring_all_reduce(over_gloo, tensor)
    for backend, group in groups.items():
        name = "labkit backend" if backend == "labkit" else backend
        found[name] = lambda tensor, group=group: dist.all_reduce(tensor, group=group)
    return found


def turns_of(comm: Comm, num_bytes: int, algorithms: dict[str, AllReduce]) -> dict[str, Turn]:
    """Each contender on the same three tensors of ``num_bytes``."""
    tensors = Tensors(comm, num_bytes)
    return {
        name: lambda name=name, algorithm=algorithm: tensors.turn(name, algorithm)
        for name, algorithm in algorithms.items()
    }


class Tensors:
    """What this rank brings, what all should have in the end, and the tensor to work in.

    Small whole numbers, of which float32 holds every sum exactly: the order of additions, in
    which the algorithms differ, then makes no difference. They repeat after 1021 elements (a
    prime), so that a chunk in the wrong place shows.
    """

    def __init__(self, comm: Comm, num_bytes: int):
        self.comm = comm
        pattern = (torch.arange(num_bytes // 4, device=comm.device) % 1021).float()
        self.mine = pattern * (comm.rank + 1)
        self.expected = pattern * (comm.world_size * (comm.world_size + 1) // 2)
        self.work = torch.empty_like(pattern)

    def turn(self, name: str, all_reduce: AllReduce) -> float:
        """This rank's seconds of one checked all-reduce, after one that nobody times.

        In between, the other contenders' turns have emptied the caches, of code as well; in a
        program that calls one all-reduce after the other they are full.
        """
        all_reduce(self.work.zero_())
        self.work.copy_(self.mine)
        seconds = timed(self.comm, lambda: all_reduce(self.work))
        if not torch.equal(self.work, self.expected):
            raise AssertionError(f"{name}: {self.work.nbytes} bytes have a wrong sum")
        return seconds


def _mpi_turn(comm: Comm, num_bytes: int, ranks: mpi.MpiRanks | None) -> Turn:
    """Rank 0 times the MPI ranks, the others sleep; their part of the time is 0."""

    def turn() -> float:
        seconds = ranks.all_reduce(num_bytes) if ranks else 0.0
        agree(comm, 0)
        return seconds

    return turn
