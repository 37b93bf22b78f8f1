"""Horovod's interface for PyTorch on our ring: ``import labkit.horovod as hvd``.

It works in a script that torchrun starts, inside ``labkit.run``, alone, and with ``hvd.run``.
Ranks may call in different orders: see ``labkit.horovod.coordinator``. Arguments, defaults and
results are those of Horovod 0.28 (horovod.readthedocs.io/en/stable/api.html), without process
sets, Adasum and elastic runs. Gradients through collectives differ (``horovod.operations``), and a
parameter that has no gradient on any rank keeps none, as on one device. ``hvd.engine().comm``
counts messages and bytes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.comm.comm import Comm
from labkit.horovod.negotiator import NegotiationError
from labkit.horovod.operations import (
    Adasum as Adasum,
    Average as Average,
    Compression as Compression,
    GlobalBatch,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
    allgather as allgather,
    allgather_async as allgather_async,
    allgather_object as allgather_object,
    allreduce as allreduce,
    allreduce_ as allreduce_,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    alltoall as alltoall,
    alltoall_async as alltoall_async,
    barrier as barrier,
    broadcast as broadcast,
    broadcast_ as broadcast_,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
    broadcast_object as broadcast_object,
    broadcast_optimizer_state as broadcast_optimizer_state,
    broadcast_parameters as broadcast_parameters,
    engine as engine,
    global_process_set as global_process_set,
    grouped_allgather as grouped_allgather,
    grouped_allgather_async as grouped_allgather_async,
    grouped_allreduce as grouped_allreduce,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_allreduce_async as grouped_allreduce_async,
    grouped_allreduce_async_ as grouped_allreduce_async_,
    grouped_reducescatter as grouped_reducescatter,
    grouped_reducescatter_async as grouped_reducescatter_async,
    init as init,
    is_initialized as is_initialized,
    join as join,
    joined,
    poll as poll,
    reducescatter as reducescatter,
    reducescatter_async as reducescatter_async,
    shutdown as shutdown,
    sparse_allreduce_async as sparse_allreduce_async,
    synchronize as synchronize,
)
from labkit.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from labkit.runtime import launch
from labkit.strategies import sync_batch_norm
from labkit.units import MOST_SECONDS

HorovodInternalError = NegotiationError
# Which libraries move the tensors: ours does on a host, gloo between hosts. (bool() is False.)
gloo_built = gloo_enabled = torch.distributed.is_gloo_available
mpi_built = mpi_enabled = mpi_threads_supported = nccl_built = ddl_built = ccl_built = bool
cuda_built, rocm_built = torch.backends.cuda.is_built, bool


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"labkit.horovod has no {name!r}. Some ranks alone: torch.distributed.new_group; a "
        "timeline: labkit.run(...).trace; elastic runs: torchrun --max-restarts"
    )


def rank() -> int:
    return joined().opened.comm.rank


def size() -> int:
    return joined().opened.comm.world_size


def local_rank() -> int:
    return joined().opened.local_rank


def local_size() -> int:
    return joined().opened.local_size


def cross_rank() -> int:
    return joined().opened.host


def cross_size() -> int:
    return len(joined().opened.hosts)


def is_homogeneous() -> bool:
    return len(set(map(len, joined().opened.hosts))) == 1


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """BatchNorm with the statistics of all ranks' batches."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.__dict__["global_batch"] = GlobalBatch(joined().opened.comm, range(size()))

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")


def run(
    func: Callable[..., Any], args: Any = (), kwargs: Any = None, np: int = 1, **launcher: Any
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``np`` ranks of this machine; returns their values.

    ``launcher``: options of horovodrun, which say how to reach other machines, have no effect.
    """
    call = functools.partial(_call, func, tuple(args), kwargs or {})
    return launch.run(call, world_size=np, timeout_s=MOST_SECONDS).values


def _call(func: Callable[..., Any], args: Any, kwargs: Any, comm: Comm) -> Any:
    return func(*args, **kwargs)
