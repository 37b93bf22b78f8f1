"""``labkit bench all-reduce``: our algorithms against gloo and NCCL, in turns in one run.

Symbols: P ranks, S bytes of one rank's tensor.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from labkit import collectives
from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.units import MOST_BYTES, check_integer, format_bytes
from workbook.measure.all_reduce_result import AllReduceResult
from workbook.measure.device_copies import ring_bytes_per_s
from workbook.measure.link_and_memory import Links, measure_memory, measure_messages
from workbook.measure.turns import (
    Where,
    check_settings,
    on_ranks,
    process_groups,
    slowest,
    take_turns,
    timed,
)

SIZES_BYTES = tuple(2**power for power in (10, 12, 16, 20, 22, 24, 26))
# Seconds for the repeats of one size.
_BUDGET_S = 5.0
_KEPT_SPANS = 1000

AllReduce = Callable[[Tensor], object]
# A contender from outside the package: a context manager that each rank enters once. It yields a
# function that takes S, runs one all-reduce of float32, and returns this rank's seconds (0 on a
# rank that does not measure the time).
Guest = Callable[[Comm], contextlib.AbstractContextManager[Callable[[int], float]]]


def bench_all_reduce(
    world_sizes: tuple[int, ...] = (2, 4),
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
    repeats: int = 50,
    device: str = "auto",
    devices: tuple[str, ...] | None = None,
    *,
    guests: Mapping[str, Guest] | None = None,
) -> Iterator[AllReduceResult]:
    """Time all available all-reduces on float32 tensors; yield one result per world size.

    The tensors are in ordinary memory, not placed in shared memory beforehand. Every turn starts
    from the same values, and every rank checks its result.

    Args:
        world_sizes: of the runs, each at least 2.
        sizes_bytes: S, multiples of 4.
        repeats: at most; large tensors get fewer, at least 5.
        device, devices: see ``labkit.run``. On ``cuda`` NCCL takes part where each rank has a GPU.
        guests: additional contenders by name, as ``tools/bench_mpi.py`` adds MPI.

    Raises:
        ValueError: impossible sizes or world sizes, before anything runs.
        WorkerError: a contender failed, or its result was wrong.
    """
    check_settings("an all-reduce", world_sizes, repeats)
    for size in sizes_bytes:
        check_integer("a size in bytes", size, least=0, most=MOST_BYTES)
        if size < 4 or size % 4:
            raise ValueError(
                f"{size} bytes are not a whole number of float32 elements: give a multiple of 4"
            )
    where = Where(device, devices)
    kind = where.kind
    links = {world_size: _links(world_size, where) for world_size in world_sizes}
    run = partial(on_ranks, measure, sizes_bytes, repeats, dict(guests or {}), where=where)
    return (
        AllReduceResult.of(slowest(run(world_size=n)), n, kind, links[n]()) for n in world_sizes
    )


def _links(world_size: int, where: Where) -> Callable[[], Links | None]:
    """Measures the links between the ranks' GPUs; they have none if a GPU has two ranks."""
    names = where.plan(world_size).devices
    if "cpu" in names or len(set(names)) < world_size:
        return lambda: None

    def measured() -> Links:
        (speed,) = on_ranks(_ring_of_copies, names, world_size=1, where=where)
        return Links(world_size, speed)

    return measured


def _ring_of_copies(comm: Comm, names: tuple[str, ...]) -> float:
    return ring_bytes_per_s(names)


def measure(
    comm: Comm, sizes_bytes: tuple[int, ...], repeats: int, guests: dict[str, Guest]
) -> dict[str, dict]:
    """Measure on this rank everything that one result needs; called on every rank."""
    over_gloo = _gloo_comm(comm)
    transports = {"shared" if comm.transport.shares_memory else dist.get_backend(): comm}
    if over_gloo:
        transports["gloo"] = over_gloo
    found: dict[str, dict] = {
        "memory": measure_memory(comm, repeats),
        "messages": measure_messages(comm, transports, repeats),
        "all_reduce": {},
    }
    with process_groups(comm) as groups, contextlib.ExitStack() as stack:
        algorithms = contenders(comm, over_gloo, groups)
        entered = {name: stack.enter_context(guest(comm)) for name, guest in guests.items()}
        for number, size in enumerate(sizes_bytes):
            comm.progress(number, len(sizes_bytes), format_bytes(size))
            tensors = Tensors(comm, size)
            turns: dict[str, Callable[[], float]] = {
                name: partial(tensors.turn, name, one) for name, one in algorithms.items()
            }
            turns |= {name: partial(guest, size) for name, guest in entered.items()}
            found["all_reduce"][size] = take_turns(comm, turns, repeats, _BUDGET_S)
    return found


def _gloo_comm(comm: Comm) -> Comm | None:
    """A Comm of the same ranks over gloo; None if ``comm`` uses gloo itself, or has no gloo."""
    if not comm.transport.shares_memory or dist.get_backend() != "gloo":
        return None
    transport = TorchTransport("gloo", comm.device)
    return Comm(comm.rank, comm.world_size, comm.device, transport, keep_spans=_KEPT_SPANS)


def contenders(
    comm: Comm, over_gloo: Comm | None, groups: dict[str, dist.ProcessGroup]
) -> dict[str, AllReduce]:
    """The all-reduces that are timed, by name; each works in place."""
    found: dict[str, AllReduce] = {
        "fast ring": partial(collectives.fast_ring_all_reduce, comm),
        "ring": partial(collectives.ring_all_reduce, comm),
        "tree": partial(collectives.tree_all_reduce, comm),
        "naive": partial(collectives.naive_all_reduce, comm),
    }
    if over_gloo:
        found["ring over gloo"] = partial(collectives.ring_all_reduce, over_gloo)
    for backend, group in groups.items():
        name = "labkit backend" if backend == "labkit" else backend
        found[name] = partial(dist.all_reduce, group=group)
    return found


class Tensors:
    """This rank's addend, the sum that all ranks must get, and the tensor to work in.

    The values are small integers, whose sums float32 holds exactly: the result does not depend on
    the order of additions, in which the algorithms differ. They repeat after 1021 elements (a
    prime), so that a chunk in the wrong place gives a wrong sum.
    """

    def __init__(self, comm: Comm, num_bytes: int):
        self.comm = comm
        pattern = (torch.arange(num_bytes // 4, device=comm.device) % 1021).float()
        self.mine = pattern * (comm.rank + 1)
        self.expected = pattern * (comm.world_size * (comm.world_size + 1) // 2)
        self.work = torch.empty_like(pattern)

    def turn(self, name: str, all_reduce: AllReduce) -> float:
        """This rank's seconds of one checked all-reduce, after one that is not timed.

        The first call fills the caches (of data and of code) again after the other contenders'
        turns: in a program that calls one all-reduce after another, they are warm.

        Raises:
            AssertionError: the sum is wrong.
        """
        all_reduce(self.work.zero_())
        self.work.copy_(self.mine)
        seconds = timed(self.comm, lambda: all_reduce(self.work))
        if not torch.equal(self.work, self.expected):
            raise AssertionError(f"{name}: {self.work.nbytes} bytes have a wrong sum")
        return seconds
