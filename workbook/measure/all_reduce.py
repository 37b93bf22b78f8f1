"""``labkit bench all-reduce``: our algorithms against gloo and NCCL, in turns in one run.

Beside the seconds stands the alpha-beta model, fitted to messages between as many ranks.

Symbols: P ranks, S bytes of one rank's tensor.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit import collectives
from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.costs.link import Link, all_reduce_seconds, crossover_bytes
from labkit.training.measured import measure_link
from labkit.units import format_bytes
from workbook.measure.record import Result
from workbook.measure.spread import Spread
from workbook.measure.turns import Where, on_ranks, slowest, take_turns, timed

SIZES_BYTES = tuple(2**power for power in (10, 12, 16, 20, 22, 24, 26))
_MODELLED = ("naive", "tree", "ring")
_REFERENCES = ("gloo", "MPI", "NCCL")
# More curves than these hide each other.
_DRAWN = ("fast ring", "ring", "tree", *_REFERENCES)

AllReduce = Callable[[Tensor], object]
# A contender from outside the package: a context manager that each rank enters once. It yields a
# function that takes S, runs one all-reduce of float32, and returns this rank's seconds (0 on a
# rank that does not measure the time).
Guest = Callable[[Comm], contextlib.AbstractContextManager[Callable[[int], float]]]


def bench_all_reduce(
    world_size: int,
    sizes_bytes: tuple[int, ...],
    repeats: int,
    where: Where,
    guests: Mapping[str, Guest] | None = None,
) -> Iterator[Result]:
    """Time all available all-reduces on float32 tensors of these sizes, multiples of 4.

    The tensors are in ordinary memory, not placed in shared memory beforehand. Every turn starts
    from the same values, and every rank checks its result: a wrong one is an error. NCCL takes
    part where each rank has a GPU; ``guests`` are additional contenders by name, as
    ``tools/bench_mpi.py`` adds MPI.
    """
    link = measure_link(world_size, "exchange", gamma=True, **where)
    settings = sizes_bytes, repeats, dict(guests or {})
    seconds = slowest(on_ranks(measure, *settings, world_size=world_size, where=where))
    yield result_of(seconds, link, world_size)


def measure(
    comm: Comm, sizes_bytes: tuple[int, ...], repeats: int, guests: dict[str, Guest]
) -> dict[int, dict[str, list[float]]]:
    """This rank's seconds by size and contender; called on every rank."""
    algorithms: dict[str, AllReduce] = {
        "fast ring": partial(collectives.fast_ring_all_reduce, comm),
        "ring": partial(collectives.ring_all_reduce, comm),
        "tree": partial(collectives.tree_all_reduce, comm),
        "naive": partial(collectives.naive_all_reduce, comm),
    }
    if comm.transport.shares_memory and dist.get_backend() == "gloo":
        transport = TorchTransport("gloo", comm.device)
        over_gloo = Comm(comm.rank, comm.world_size, comm.device, transport, keep_spans=1000)
        algorithms["ring over gloo"] = partial(collectives.ring_all_reduce, over_gloo)
    backends = {"gloo": "gloo", "labkit": "labkit backend"}
    if comm.device.type == "cuda":
        backends = {"gloo": "gloo"} | ({"nccl": "NCCL"} if dist.get_backend() == "nccl" else {})
    for backend, name in backends.items():
        algorithms[name] = partial(dist.all_reduce, group=dist.new_group(backend=backend))
    found = {}
    with contextlib.ExitStack() as stack:
        entered = {name: stack.enter_context(guest(comm)) for name, guest in guests.items()}
        for number, size in enumerate(sizes_bytes):
            comm.progress(number, len(sizes_bytes), format_bytes(size))
            tensors = Tensors(comm, size)
            turns = {n: partial(tensors.turn, n, one) for n, one in algorithms.items()}
            turns |= {name: partial(guest, size) for name, guest in entered.items()}
            found[size] = take_turns(turns, repeats)
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


def result_of(seconds: dict[int, dict[str, list[float]]], link: Link, world_size: int) -> Result:
    """The result of the slowest rank's seconds, and the model beside it.

    ``bus_GB/s`` is 2 (P - 1) / P x S / t, which each link of a ring carries (busbw of nccl-tests).
    """

    def model_s(size: int, name: str, spread: Spread | None = None) -> float | None:
        return all_reduce_seconds(name, size, world_size, link) if name in _MODELLED else None

    def ratio(size: int, name: str, spread: Spread) -> float | None:
        expected_s = model_s(size, name)
        return spread.median / expected_s if expected_s else None

    def bus(size: int, name: str, spread: Spread) -> float:
        return 2 * (world_size - 1) / world_size * size / spread.median / 1e9

    present = next(iter(seconds.values()))
    crossover = crossover_bytes(world_size, link)

    def figure() -> Any:
        from workbook.plots import size_curves

        curves = {n: {s: one[n] for s, one in seconds.items()} for n in _DRAWN if n in present}
        model: Any = {n: {s: model_s(s, n) for s in seconds} for n in ("ring", "tree")}
        title = f"All-reduce on {world_size} ranks"
        return size_curves(curves, model, crossover, between=("tree", "ring"), title=title)

    overtakes = format_bytes(crossover) if math.isfinite(crossover) else "never"
    return Result(
        f"All-reduce of float32 in place, {world_size} ranks, in turns",
        {"world_size": world_size},
        seconds,
        tuple(name for name in _REFERENCES if name in present),
        "size_bytes",
        {"bus_GB/s": bus, "model_s": model_s, "measured/model": ratio},
        (str(link), f"The ring overtakes the tree in the model: {overtakes}."),
        {f"{world_size}_ranks": figure},
    )
