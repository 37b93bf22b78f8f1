"""Horovod's interface for PyTorch on our ring: ``import labkit.horovod as hvd``.

It works in a script that torchrun starts, inside ``labkit.run``, alone, and with ``hvd.run``.
Ranks may call in different orders: see ``labkit.collectives.negotiated``. Arguments, defaults and
results are those of Horovod 0.28 (horovod.readthedocs.io/en/stable/api.html), without process
sets, Adasum and elastic runs. Gradients through collectives differ (``by_name.operations``), and a
parameter that has no gradient on any rank keeps none, as on one device. ``hvd.engine().comm``
counts messages and bytes.
"""

import functools
from collections.abc import Callable, Iterable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.collectives.handle import Handle
from labkit.collectives.negotiated import NegotiationError, Negotiator
from labkit.comm.comm import Comm
from labkit.runtime import launch
from labkit.runtime.script import open_for
from labkit.strategies import sync_batch_norm
from labkit.strategies.by_name import reductions
from labkit.strategies.by_name.compression import Compression as Compression
from labkit.strategies.by_name.operations import GlobalBatch, Operations, SparseHandle
from labkit.strategies.by_name.optimizer import distributed
from labkit.units import MOST_SECONDS

Average, Sum, Adasum = reductions.Average, reductions.Sum, reductions.Adasum
Min, Max, Product = reductions.Min, reductions.Max, reductions.Product
HorovodInternalError, global_process_set = NegotiationError, "all ranks"
_joined: Operations | None = None


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"labkit.horovod has no {name!r}. Some ranks alone: torch.distributed.new_group; a "
        "timeline: labkit.run(...).trace; elastic runs: torchrun --max-restarts"
    )


def init(comm: Comm | Iterable[int] | None = None) -> None:
    """Join the other ranks, unless this one has. ``comm``: of ``labkit.run``, or all ranks."""
    global _joined
    if _joined is None:
        mine = comm if isinstance(comm, Comm) else None
        _joined = Operations(open_for("horovod", mine, shutdown))
    if not isinstance(comm, Comm | None) and list(comm) not in ([], list(range(size()))):
        raise ValueError(
            f"init({comm!r}): all {size()} ranks take part, so call init() without it"
        )


def shutdown() -> None:
    """Leave the other ranks; ``init`` joins them again."""
    global _joined
    ended, _joined = _joined, None
    if ended is not None and ended.opened.is_mine():
        ended.end()


def is_initialized() -> bool:
    return _joined is not None


def _now() -> Operations:
    if _joined is None:
        raise ValueError("labkit.horovod has not been initialized: call hvd.init() first")
    return _joined


def engine() -> Negotiator:
    """The thread that carries everything out; its ``comm`` counts what is sent."""
    return _now().engine


def _asked(question: Callable[[Operations], Any]) -> Callable[[], Any]:
    return lambda: question(_now())


rank, size = _asked(lambda now: now.rank), _asked(lambda now: now.size)
local_rank = _asked(lambda now: now.opened.local_rank)
local_size = _asked(lambda now: now.opened.local_size)
cross_rank, cross_size = _asked(lambda now: now.opened.host), _asked(lambda now: len(now.hosts))
is_homogeneous = _asked(lambda now: len(set(map(len, now.hosts))) == 1)
# Which libraries move the tensors: ours does on a host, gloo between hosts. (bool() is False.)
gloo_built = gloo_enabled = torch.distributed.is_gloo_available
mpi_built = mpi_enabled = mpi_threads_supported = nccl_built = ddl_built = ccl_built = bool
cuda_built, rocm_built = torch.backends.cuda.is_built, bool


def _of(method: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, process_set: Any = None, **more: Any) -> Any:
        if process_set not in (None, global_process_set):
            raise ValueError("all ranks take part here: leave process_set out")
        return method(_now(), *args, **more, **fixed)

    return call


def _at_once(begin: Callable[..., Handle]) -> Callable[..., Any]:
    return functools.wraps(begin)(lambda *args, **more: begin(*args, **more).wait())


synchronize, poll = methodcaller("wait"), methodcaller("is_done")
allreduce, allreduce_async = _of(Operations.allreduce), _of(Operations.allreduce_async)
allreduce_async_ = _of(Operations.allreduce_async, in_place=True)
grouped_allreduce = _of(Operations.grouped_allreduce)
grouped_allreduce_async = _of(Operations.grouped_allreduce_async)
grouped_allreduce_async_ = _of(Operations.grouped_allreduce_async, in_place=True)
allreduce_, grouped_allreduce_ = _at_once(allreduce_async_), _at_once(grouped_allreduce_async_)
allgather, allgather_async = _of(Operations.allgather), _of(Operations.allgather_async)
grouped_allgather = _of(Operations.grouped_allgather)
grouped_allgather_async = _of(Operations.grouped_allgather_async)
broadcast, broadcast_async = _of(Operations.broadcast), _of(Operations.broadcast_async)
broadcast_async_ = _of(Operations.broadcast_async, in_place=True)
broadcast_ = _at_once(broadcast_async_)
alltoall, alltoall_async = _of(Operations.alltoall), _of(Operations.alltoall_async)
reducescatter = _of(Operations.reducescatter)
reducescatter_async = _of(Operations.reducescatter_async)
grouped_reducescatter = _of(Operations.grouped_reducescatter)
grouped_reducescatter_async = _of(Operations.grouped_reducescatter_async)
sparse_allreduce_async = _of(Operations.sparse_allreduce_async)
barrier, join = _of(Operations.barrier), _of(Operations.join)
broadcast_parameters = _of(Operations.broadcast_parameters)
broadcast_optimizer_state = _of(Operations.broadcast_optimizer_state)
broadcast_object = _of(Operations.broadcast_object)
allgather_object = _of(Operations.allgather_object)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
) -> Optimizer:
    """``optimizer``, whose ``step`` uses gradients that were reduced while backward still ran.

    Args:
        named_parameters: names by which the ranks agree; by default their order counts.
        compression: ``Compression.none`` or ``Compression.fp16``, see there.
        backward_passes_per_step: after how many passes a gradient is reduced; they add up.
        op: Average or Sum.
        gradient_predivide_factor: divides before an average, and multiplies after it.
        num_groups, groups: no effect, as what is ready at the same time is fused anyway.
        sparse_as_dense: whether sparse gradients become dense.
    """
    if op not in (Average, Sum):
        raise ValueError(f"op={op!r}: gradients are reduced by hvd.Average or hvd.Sum")
    if gradient_predivide_factor != 1.0 and (op != Average or gradient_predivide_factor <= 0):
        raise ValueError(
            "gradient_predivide_factor is above 0 and for op=hvd.Average: leave it out"
        )
    scales = 1 / gradient_predivide_factor, gradient_predivide_factor

    def begin(name: str, tensor: Tensor, **told: Any) -> Handle | SparseHandle:
        if tensor.is_sparse:
            return _now().sparse_allreduce_async(tensor, name, op)
        return _now().allreduce_async(tensor, None, name, op, *scales, **told)

    options = compression, backward_passes_per_step, sparse_as_dense
    return distributed(optimizer, named_parameters, begin, *options)


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """BatchNorm with the statistics of all ranks' batches."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.__dict__["global_batch"] = GlobalBatch(_now(), self)

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
