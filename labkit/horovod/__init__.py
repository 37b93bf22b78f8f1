"""Horovod's interface for PyTorch on our collectives: ``import labkit.horovod as hvd``.

It works in a script that torchrun starts, inside ``labkit.run``, and alone. Ranks may call in
different orders: see ``labkit.horovod.coordinator``. Arguments, defaults and results are those of
Horovod 0.28 (horovod.readthedocs.io/en/stable/api.html), as far as its examples use them.
``hvd.engine().comm`` counts messages and bytes.

``allreduce_async_`` submits and returns a handle for ``synchronize``; ``..._`` works in place; the
others wait and return a new tensor, without a gradient. A name says what belongs together on all
ranks; without one, the order of the calls does.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.collectives.common import Reduction, check_root, mean_of
from labkit.engine.runtime.plain import dump_plain, load_plain
from labkit.horovod.negotiator import (
    Handle,
    HorovodInternalError as HorovodInternalError,
    engine,
    init as init,
    shutdown as shutdown,
)
from labkit.horovod.optimizer import (
    Average,
    Compression as Compression,
    DistributedOptimizer as DistributedOptimizer,
    Sum as Sum,
)
from labkit.strategies import sync_batch_norm


def rank() -> int:
    return engine().comm.rank


def size() -> int:
    return engine().comm.world_size


def local_rank() -> int:
    return engine().opened.local_rank


def local_size() -> int:
    return engine().opened.local_size


def allreduce_async_(tensor: Tensor, *, name: str | None = None, op: str = Average) -> Handle:
    """Begin to reduce in place by ``op``: Average or Sum."""
    if op == Average:
        op = mean_of(tensor.dtype)
    Reduction.of(op, tensor)
    return engine().submit("allreduce", name, tensor, op)


def synchronize(handle: Handle) -> Tensor:
    """Wait for the result of a handle, and return it."""
    return handle.wait()


def allreduce_(tensor: Tensor, *, name: str | None = None, op: str = Average) -> Tensor:
    allreduce_async_(tensor, name=name, op=op).wait()
    return tensor


def allreduce(tensor: Tensor, *, name: str | None = None, op: str = Average) -> Tensor:
    return allreduce_(_copy_of(tensor), name=name, op=op)


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Put all ranks' tensors one below the other; their first dimensions may differ."""
    if tensor.dim() == 0:
        raise ValueError("allgather works along rows: use tensor.reshape(1)")
    return engine().submit("allgather", name, _copy_of(tensor)).wait()


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Copy the root's values, in place."""
    check_root(engine().comm, root_rank)
    engine().submit("broadcast", name, tensor, str(root_rank)).wait()
    return tensor


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    return broadcast_(_copy_of(tensor), root_rank, name)


def _copy_of(tensor: Tensor) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError("no gradient flows through a collective here: give tensor.detach()")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return all ranks' objects, by rank: plain data, see ``labkit.engine.runtime.plain``."""
    data = torch.frombuffer(bytearray(dump_plain(obj)), dtype=torch.uint8)
    lengths = allgather(torch.tensor([len(data)]), name and f"{name}.lengths")
    parts = allgather(data, name).split(lengths.tolist())
    return [load_plain(part.numpy().tobytes()) for part in parts]


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the root's object, on all ranks."""
    check_root(engine().comm, root_rank)
    if rank() == root_rank:
        allgather_object(obj, name)
        return obj
    return allgather_object(None, name)[root_rank]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copy a state dict or named parameters from the root, in place."""
    # Of a list the order: the parameters of two models may have the same names.
    named = sorted(params.items()) if isinstance(params, dict) else list(params)
    for name, value in named:
        # A state dict may hold other things, too.
        if isinstance(value, Tensor):
            broadcast_(value, root_rank, name)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int) -> None:
    """Copy the root's state, also an empty one, and options such as the learning rate."""
    state = broadcast_object(optimizer.state_dict(), root_rank, "optimizer_state")
    if rank() != root_rank:
        optimizer.load_state_dict(state)


class _GlobalBatch(sync_batch_norm.GlobalBatch):
    """The exchange of all ranks' statistics through the background thread."""

    def gathered(self, row: Tensor) -> Tensor:
        return allgather(row[None])


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm, nn.SyncBatchNorm):
    """BatchNorm with the statistics of all ranks' batches, of inputs of any dimension."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.__dict__["global_batch"] = _GlobalBatch(engine().comm, range(size()))
