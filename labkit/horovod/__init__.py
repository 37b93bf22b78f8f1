"""Horovod's interface for PyTorch on our ring: ``import labkit.horovod as hvd``.

It works in a script that torchrun starts, inside ``labkit.run``, and alone. Ranks may call in
different orders: see ``labkit.horovod.coordinator``. Names and results are those of Horovod 0.28
(horovod.readthedocs.io/en/stable/api.html), for training with ``DistributedOptimizer``; results
carry no gradients. ``hvd.engine().comm`` counts messages and bytes.

``..._async`` submits and returns a ``Handle``; ``..._`` works in place; the others wait for the
result. A name says what belongs together on all ranks; without one, the order of the calls does.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.collectives.common import check_root
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


def rank() -> int:
    return engine().comm.rank


def size() -> int:
    return engine().comm.world_size


def local_rank() -> int:
    return engine().opened.local_rank


def local_size() -> int:
    return engine().opened.local_size


def _submit(
    kind: str, tensor: Tensor, name: str | None, option: str, in_place: bool, compression: Any
) -> Handle:
    """Submit a collective whose result is where the tensor is, or the tensor itself."""
    small, context = compression.compress(tensor.detach())

    def delivered(result: Tensor) -> Tensor:
        found = compression.decompress(result, context)
        if not in_place:
            # (A part of a buffer would keep all of it in memory.)
            return found.to(tensor.device, copy=True)
        tensor.detach().copy_(found)
        return tensor

    return engine().submit(kind, name, small, delivered, option)


def allreduce_async(
    tensor: Tensor,
    *,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    in_place: bool = False,
) -> Handle:
    """Reduce by ``op``: Average, Sum, Min, Max or Product; ``compression`` makes what travels."""
    return _submit("allreduce", tensor, name, op, in_place, compression)


def allreduce(tensor: Tensor, **options: Any) -> Tensor:
    """The reduced tensor; ``options`` as in ``allreduce_async``."""
    return allreduce_async(tensor, **options).wait()


allreduce_async_ = partial(allreduce_async, in_place=True)
allreduce_ = partial(allreduce, in_place=True)


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """All ranks' tensors, one below the other; their first dimensions may differ."""
    found = engine().submit("allgather", name, tensor.detach(), torch.cat).wait()
    return found.to(tensor.device)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, in_place: bool = False
) -> Handle:
    """The root's values."""
    check_root(engine().comm, root_rank)
    return _submit("broadcast", tensor, name, str(root_rank), in_place, Compression.none)


def broadcast(tensor: Tensor, root_rank: int, **options: Any) -> Tensor:
    return broadcast_async(tensor, root_rank, **options).wait()


broadcast_async_ = partial(broadcast_async, in_place=True)
broadcast_ = partial(broadcast, in_place=True)


def synchronize(handle: Handle) -> Any:
    """Wait for the result of a handle, and return it."""
    return handle.wait()


def barrier() -> None:
    """Wait until all ranks have come."""
    engine().submit("barrier", "all").wait()


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object, plain data (``labkit.runtime.plain``); on the root the object itself."""
    check_root(engine().comm, root_rank)
    mine = dump_plain(obj if rank() == root_rank else None)
    data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    found = engine().submit("allgather", name, data).wait()[root_rank]
    return obj if rank() == root_rank else load_plain(found.numpy().tobytes())


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copy a state dict or named parameters from the root, in place."""
    named = sorted(params.items()) if isinstance(params, dict) else list(params)
    # A state dict may hold other things, too.
    tensors = [(name, one) for name, one in named if isinstance(one, Tensor)]
    for handle in [broadcast_async_(one, root_rank, name) for name, one in tensors]:
        handle.wait()


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int) -> None:
    """Copy the root's state, also an empty one, and options such as the learning rate."""
    # Horovod makes a state by a step on zeros, and scripts find these gradients.
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if not optimizer.state and parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
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
