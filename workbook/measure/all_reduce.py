"""All-reduces that take turns: our algorithms, those of gloo and NCCL, and guests from outside.

Symbols: P ranks, S bytes of one rank's tensor.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from labkit import collectives
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.torch_transport import TorchTransport
from labkit.units import format_bytes
from workbook.measure.turns import Turn, take_turns, timed

# The one whose tensors lie in shared memory beforehand, as DDP's buckets do.
_IN_PLACE = "in place"

AllReduce = Callable[[Tensor], object]
# A contender from outside the package: a context manager that each rank enters once. It yields a
# function that takes S, runs one all-reduce of float32, and returns this rank's seconds (0 on a
# rank that does not measure the time).
Guest = Callable[[Comm], contextlib.AbstractContextManager[Callable[[int], float]]]


def measure(
    comm: Comm, sizes_bytes: Sequence[int], repeats: int, guests: dict[str, Guest]
) -> dict[int, dict[str, list[float]]]:
    """Return this rank's seconds by size and contender; called on every rank.

    The tensors are float32; only those of ``in place`` are in shared memory beforehand, as DDP's
    buckets are. Every rank checks each result: a wrong one is an error.
    """
    algorithms = contenders(comm)
    seconds = {}
    with contextlib.ExitStack() as stack:
        guest_turns = {name: stack.enter_context(guest(comm)) for name, guest in guests.items()}
        for number, size in enumerate(sizes_bytes):
            comm.progress(number, len(sizes_bytes), format_bytes(size))
            turns = checked_turns(comm, size, algorithms)
            for name, guest_turn in guest_turns.items():
                turns[name] = partial(guest_turn, size)
            seconds[size] = take_turns(turns, repeats)
    return seconds


def contenders(comm: Comm) -> dict[str, AllReduce]:
    """Our algorithms, then those of the backends that these ranks can use."""
    algorithms: dict[str, AllReduce] = {
        "fast": partial(collectives.fast_all_reduce, comm),
        "direct": partial(collectives.direct_all_reduce, comm),
        "fast ring": partial(collectives.fast_ring_all_reduce, comm),
        "ring": partial(collectives.ring_all_reduce, comm),
        "tree": partial(collectives.tree_all_reduce, comm),
        "naive": partial(collectives.naive_all_reduce, comm),
    }
    if comm.transport.shares_memory and dist.get_backend() == "gloo":
        transport = TorchTransport("gloo", comm.device)
        over_gloo = Comm(comm.rank, comm.world_size, comm.device, transport, keep_spans=1000)
        algorithms["ring over gloo"] = partial(collectives.ring_all_reduce, over_gloo)
    backends = {"gloo": "gloo"}
    if comm.device.type == "cpu":
        backends["labkit"] = "labkit backend"
    elif dist.get_backend() == "nccl":
        backends["nccl"] = "NCCL"
    for backend, name in backends.items():
        algorithms[name] = partial(dist.all_reduce, group=dist.new_group(backend=backend))
    return algorithms


def checked_turns(
    comm: Comm, num_bytes: int, algorithms: Mapping[str, AllReduce]
) -> dict[str, Turn]:
    """A turn for each algorithm: this rank's seconds of one all-reduce, whose sum is checked.

    The values are small integers, whose sums float32 holds exactly: the result does not depend on
    the order of additions, in which the algorithms differ. They repeat after 1021 elements (a
    prime), so that a chunk in the wrong place gives a wrong sum.
    """
    pattern = (torch.arange(num_bytes // 4, device=comm.device) % 1021).float()
    values = pattern * (comm.rank + 1)
    expected = pattern * (comm.world_size * (comm.world_size + 1) // 2)
    tensor = torch.empty_like(pattern)
    calls = {name: partial(reduce, tensor) for name, reduce in algorithms.items()}
    tensors = dict.fromkeys(algorithms, tensor)
    if comm.transport.shares_memory:
        bucket = collectives.SharedBucket(comm, num_bytes // 4, tensor.dtype, comm.device)
        calls[_IN_PLACE] = partial(bucket.all_reduce, comm)
        tensors[_IN_PLACE] = bucket.flat[: num_bytes // 4]

    def turn(name: str) -> float:
        work = tensors[name]
        # The first call fills the caches (of data and of code) again after the others' turns: in
        # a program that calls one all-reduce after another, they are warm.
        work.zero_()
        calls[name]()
        work.copy_(values)
        seconds = timed(comm, calls[name])
        if not torch.equal(work, expected):
            raise AssertionError(f"{name}: {num_bytes} bytes have a wrong sum")
        return seconds

    return {name: partial(turn, name) for name in calls}
