"""Horovod's interface for PyTorch on our ring: ``import labkit.horovod as hvd``.

It works in a script that torchrun starts, inside ``labkit.run``, and alone.
Ranks may call in different orders: see ``labkit.horovod.coordinator``. Arguments, defaults and
results are those of Horovod 0.28 (horovod.readthedocs.io/en/stable/api.html) for all-reduce,
all-gather, broadcast, join, the optimizer and SyncBatchNorm; what else there is, is in
``torch.distributed``. ``hvd.engine().comm`` counts messages and bytes.

``..._async`` submits and returns a ``Handle``; ``..._`` works in place; the others wait for the
result. Each takes one tensor or (``grouped_...``) a list of them. A name says what belongs
together on all ranks; without one, the order of the calls does. Results carry no gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.collectives.common import Reduction, check_root
from labkit.horovod.coordinator import JOIN
from labkit.horovod.negotiator import (
    Handle,
    NegotiationError,
    engine as engine,
    init as init,
    is_initialized as is_initialized,
    shutdown as shutdown,
)
from labkit.horovod.optimizer import (
    Average as Average,
    Compression as Compression,
    DistributedOptimizer as DistributedOptimizer,
    Sum as Sum,
)
from labkit.runtime.plain import dump_plain, load_plain
from labkit.strategies import sync_batch_norm

Min, Max, Product = "min", "max", "product"
HorovodInternalError = NegotiationError
# Which libraries move the tensors: ours does on a host, gloo between hosts. (bool() is False.)
gloo_built = gloo_enabled = torch.distributed.is_gloo_available
mpi_built = mpi_enabled = mpi_threads_supported = nccl_built = ddl_built = ccl_built = bool
cuda_built, rocm_built = torch.backends.cuda.is_built, bool


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"labkit.horovod has no {name!r}. Other collectives, and gradients through them: "
        "torch.distributed; a start from a program, and a timeline: labkit.run; elastic runs: "
        "torchrun --max-restarts"
    )


def rank() -> int:
    return engine().comm.rank


def size() -> int:
    return engine().comm.world_size


def local_rank() -> int:
    return engine().opened.local_rank


def local_size() -> int:
    return engine().opened.local_size


def cross_rank() -> int:
    return engine().opened.host


def cross_size() -> int:
    return len(engine().opened.hosts)


def _submit(
    kind: str,
    tensor: Any,
    name: str | None,
    take: Callable[[Any], Tensor],
    option: str = "",
    process_set: Any = None,
    in_place: bool = False,
    compression: Any = Compression.none,
) -> Any:
    """Submit a collective of one tensor, or of each of a list; returns a ``Handle`` or a list.

    ``take`` makes a tensor of the result, which moves to where the tensor is.
    """
    if process_set is not None:
        raise NotImplementedError("all ranks take part: for some use torch.distributed.new_group")
    if not isinstance(tensor, Tensor):
        more = take, option, process_set, in_place, compression
        names = [name and f"{name}.{number}" for number in range(len(tensor))]
        return [_submit(kind, one, name, *more) for one, name in zip(tensor, names)]
    small, context = compression.compress(tensor)

    def delivered(result: Any) -> Tensor:
        found = compression.decompress(take(result), context)
        if not in_place:
            # (A part of a buffer would keep all of it in memory.)
            return found.to(tensor.device, copy=True)
        tensor.detach().copy_(found)
        return tensor

    return engine().submit(kind, name, small, delivered, option)


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    **more: Any,
) -> Any:
    """Reduce by ``op``: Average (also ``average``, its older name), Sum, Min, Max or Product."""
    op = op or (Sum if average is False else Average)
    factor = prescale_factor * postscale_factor
    for one in [tensor] if isinstance(tensor, Tensor) else tensor:
        # Averages of integers are rounded.
        Reduction.of(Sum if op == Average else op, one)

    def take(found: Tensor) -> Tensor:
        return found if factor == 1 else (found * factor).to(found.dtype)

    return _submit("allreduce", tensor, name, take, op, process_set, **more)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    *args: Any,
    **more: Any,
) -> Any:
    """Reduced tensors, see ``allreduce_async``; ``compression`` makes what travels."""
    more["compression"] = compression
    return synchronize(allreduce_async(tensor, average, name, *args, **more))


def allreduce_async_(*args: Any, **more: Any) -> Any:
    return allreduce_async(*args, **more, in_place=True)


def allreduce_(*args: Any, **more: Any) -> Any:
    return synchronize(allreduce_async_(*args, **more))


def allgather_async(tensor: Any, name: str | None = None, process_set: Any = None) -> Any:
    """All ranks' tensors, one below the other; their first dimensions may differ."""
    return _submit("allgather", tensor, name, torch.cat, process_set=process_set)


def allgather(*args: Any, **more: Any) -> Any:
    return synchronize(allgather_async(*args, **more))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None, **more: Any
) -> Handle:
    """The root's values."""
    check_root(engine().comm, root_rank)
    return _submit(
        "broadcast", tensor, name, lambda found: found, str(root_rank), process_set, **more
    )


def broadcast(*args: Any, **more: Any) -> Tensor:
    return broadcast_async(*args, **more).wait()


def broadcast_async_(*args: Any, **more: Any) -> Handle:
    return broadcast_async(*args, **more, in_place=True)


def broadcast_(*args: Any, **more: Any) -> Tensor:
    return broadcast_async_(*args, **more).wait()


grouped_allreduce, grouped_allreduce_async = allreduce, allreduce_async
grouped_allreduce_, grouped_allreduce_async_ = allreduce_, allreduce_async_
grouped_allgather, grouped_allgather_async = allgather, allgather_async


def synchronize(handle: Any) -> Any:
    """Wait for the result of a handle (or of a group's), and return it."""
    return [one.wait() for one in handle] if isinstance(handle, list) else handle.wait()


def poll(handle: Any) -> bool:
    """Whether the result of a handle is there."""
    return all(one.is_done for one in handle) if isinstance(handle, list) else handle.is_done


def barrier() -> None:
    """Wait until all ranks have come."""
    engine().submit("barrier", "all").wait()


def join(device: int = -1) -> int:
    """Contribute zeros until all ranks have joined; returns the rank that came last."""
    last = engine().submit(JOIN, JOIN).wait()
    # Ranks that have joined early have called less; now all are at the same point.
    engine().numbers.clear()
    return last


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """All ranks' objects, by rank: plain data, see ``labkit.runtime.plain``."""
    data = torch.frombuffer(bytearray(dump_plain(obj)), dtype=torch.uint8)
    parts = engine().submit("allgather", name, data).wait()
    return [load_plain(part.numpy().tobytes()) for part in parts]


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object; on the root the object itself."""
    check_root(engine().comm, root_rank)
    found = allgather_object(obj if rank() == root_rank else None, name)
    return obj if rank() == root_rank else found[root_rank]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copy a state dict or named parameters from the root, in place."""
    named = sorted(params.items()) if isinstance(params, dict) else list(params)
    # A state dict may hold other things, too.
    tensors = [(name, one) for name, one in named if isinstance(one, Tensor)]
    for handle in [broadcast_async_(one, root_rank, name) for name, one in tensors]:
        handle.wait()


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int) -> None:
    """Copy the root's state, also an empty one, and options such as the learning rate."""
    state = broadcast_object(optimizer.state_dict(), root_rank, "optimizer_state")
    if rank() != root_rank:
        optimizer.load_state_dict(state)


class _GlobalBatch(sync_batch_norm.GlobalBatch):
    """What ranks tell each other about their batches, here through the background thread."""

    def gathered(self, mine: Tensor) -> Tensor:
        return allgather(mine[None])


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """BatchNorm with the statistics of all ranks' batches."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.__dict__["global_batch"] = _GlobalBatch(engine().comm, range(size()))

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")
