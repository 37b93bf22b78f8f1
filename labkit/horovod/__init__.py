"""Horovod's interface for PyTorch on our ring: ``import labkit.horovod as hvd``.

It works in a script that torchrun starts, inside ``labkit.run``, and alone.
Ranks may call in different orders: see ``labkit.horovod.coordinator``. Arguments, defaults and
results are those of Horovod 0.28 (horovod.readthedocs.io/en/stable/api.html), without process
sets, Adasum, a timeline, ``hvd.run`` and elastic runs. ``hvd.engine().comm`` counts
messages and bytes.

``..._async`` submits and returns a ``Handle``; ``..._`` works in place; the others wait for the
result. Each takes one tensor or (``grouped_...``) a list of them. A name says what belongs
together on all ranks; without one, the order of the calls does.

The gradient of a collective is another one: of a sum over ranks the sum of their gradients, of an
all-gather the own rows of the averaged gradients, of a broadcast their average on the root, of an
all-to-all the way back, of a reduce-scatter the all-gather, times P ranks for a sum. These factors
are Horovod's, as scripts rely on them; the derivative of the sum of all losses has sums and no P.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.collectives.common import Reduction, check_root, mean_of
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
    sparse_allreduce_async as sparse_allreduce_async,
)
from labkit.runtime.plain import dump_plain, load_plain
from labkit.strategies import sync_batch_norm

Min, Max, Product = "min", "max", "product"
global_process_set = "all ranks"
HorovodInternalError = NegotiationError
# Which libraries move the tensors: ours does on a host, gloo between hosts. (bool() is False.)
gloo_built = gloo_enabled = torch.distributed.is_gloo_available
mpi_built = mpi_enabled = mpi_threads_supported = nccl_built = ddl_built = ccl_built = bool
cuda_built, rocm_built = torch.backends.cuda.is_built, bool


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


def is_homogeneous() -> bool:
    return len(set(map(len, engine().opened.hosts))) == 1


class _Differentiable(torch.autograd.Function):
    """``run(tensors)`` forward and ``gradient(gradients)`` backward, each on a list."""

    @staticmethod
    def forward(ctx: Any, run: Any, gradient: Any, *tensors: Tensor) -> Any:
        ctx.gradient = gradient
        return tuple(run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.gradient(list(gradients))


def _with_gradient(begin: Any, gradient: Any, tensor: Any) -> Any:
    """The results of ``begin(tensor)``, a handle for each: of one tensor, or of a list."""
    if isinstance(tensor, Tensor):
        return _Differentiable.apply(lambda of: [begin(of[0]).wait()], gradient, tensor)[0]
    return list(_Differentiable.apply(lambda of: synchronize(begin(of)), gradient, *tensor))


def _of_gradient(name: str | None, op: str | None = None) -> str | None:
    """The name under which the gradient travels; ValueError where there is none."""
    if op not in (None, Average, Sum):
        raise ValueError(f"the {op} over ranks has no gradient here: use hvd.Sum or hvd.Average")
    return name and f"{name}.gradient"


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """What is an integer is rounded towards 0."""
    is_exact = not (tensor.is_floating_point() or tensor.is_complex())
    wide = tensor.double() if is_exact else tensor
    return tensor if factor == 1 else (wide * factor).to(tensor.dtype)


def _submit(
    kind: str,
    tensor: Any,
    name: str | None,
    take: Callable[[Any], Tensor] = lambda found: found,
    option: str = "",
    process_set: Any = None,
    in_place: bool = False,
    compression: Any = Compression.none,
    scales: tuple[float, float] = (1.0, 1.0),
    splits: Sequence[int] = (),
) -> Any:
    """Submit a collective of one tensor, or of each of a list; returns a ``Handle`` or a list.

    ``take`` makes a tensor of the result, which moves to where the tensor is.
    """
    if process_set not in (None, global_process_set):
        raise NotImplementedError("all ranks take part: for some use torch.distributed.new_group")
    if not isinstance(tensor, Tensor):
        more = take, option, process_set, in_place, compression, scales
        names = [name and f"{name}.{number}" for number in range(len(tensor))]
        return [_submit(kind, one, name, *more) for one, name in zip(tensor, names)]
    if kind in ("allreduce", "reducescatter"):
        Reduction.of(mean_of(tensor.dtype) if option == Average else option, tensor)
    small, context = compression.compress(tensor.detach())

    def delivered(result: Any) -> Tensor:
        found = compression.decompress(_scaled(take(result), scales[1]), context)
        if not in_place:
            # (A part of a buffer would keep all of it in memory.)
            return found.to(tensor.device, copy=True)
        tensor.detach().copy_(found)
        return tensor

    return engine().submit(kind, name, _scaled(small, scales[0]), delivered, option, splits)


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
    """Reduce by ``op``: Average (also ``average``, its older name), Sum, Min, Max or Product.

    The factors are for before and after it.
    """
    more |= {"process_set": process_set, "scales": (prescale_factor, postscale_factor)}
    if average is not None and op is not None:
        raise ValueError("give op= or average=, not both")
    op = op or (Sum if average is False else Average)
    return _submit("allreduce", tensor, name, option=op, **more)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    *args: Any,
    **more: Any,
) -> Any:
    """Reduced tensors, see ``allreduce_async``; ``compression`` makes what travels."""

    def begin(of: Any) -> Any:
        return allreduce_async(of, average, name, op, *args, compression=compression, **more)

    def gradient(of: list[Tensor]) -> list[Tensor]:
        return allreduce(of, average, _of_gradient(name, op), compression, op, *args, **more)

    return _with_gradient(begin, gradient, tensor)


allreduce_async_ = partial(allreduce_async, in_place=True)


def allreduce_(*args: Any, **more: Any) -> Any:
    return synchronize(allreduce_async_(*args, **more))


def allgather_async(tensor: Any, name: str | None = None, process_set: Any = None) -> Any:
    """All ranks' tensors, one below the other; their first dimensions may differ."""
    return _submit("allgather", tensor, name, torch.cat, process_set=process_set)


def allgather(tensor: Any, name: str | None = None, process_set: Any = None) -> Any:
    def gradient(of: list[Tensor]) -> list[Tensor]:
        ones = [tensor] if isinstance(tensor, Tensor) else tensor
        mine = torch.tensor([[len(one) for one in ones]])
        counts = allgather(mine, name and f"{name}.rows").t().tolist()
        means = allreduce(of, name=_of_gradient(name))
        return [mean.split(rows)[rank()] for mean, rows in zip(means, counts)]

    return _with_gradient(lambda of: allgather_async(of, name, process_set), gradient, tensor)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None, **more: Any
) -> Handle:
    """The root's values."""
    check_root(engine().comm, root_rank)
    more |= {"option": str(root_rank), "process_set": process_set}
    return _submit("broadcast", tensor, name, **more)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Tensor:
    def gradient(of: list[Tensor]) -> list[Tensor]:
        means = allreduce(of, name=_of_gradient(name))
        return means if rank() == root_rank else [torch.zeros_like(one) for one in means]

    return _with_gradient(
        lambda of: broadcast_async(of, root_rank, name, process_set), gradient, tensor
    )


broadcast_async_ = partial(broadcast_async, in_place=True)


def broadcast_(*args: Any, **more: Any) -> Tensor:
    return broadcast_async_(*args, **more).wait()


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Handle:
    """Send ``splits[r]`` rows to rank r, by default equal parts.

    The result is the rows of all ranks for this one; with ``splits`` also how many each sent.
    """
    rows, ranks = len(tensor), size()
    counts = [rows // ranks] * ranks if splits is None else torch.as_tensor(splits).tolist()
    is_whole = all(isinstance(count, int) and count >= 0 for count in counts)
    if not is_whole or len(counts) != ranks or sum(counts) != rows:
        raise ValueError(f"{rows} rows for {ranks} ranks cannot be split as {counts}: give splits")
    more = {"process_set": process_set, "splits": counts}
    handle = _submit("alltoall", tensor, name, torch.cat, **more)
    take = handle.take
    if splits is not None:
        handle.take = lambda parts: (take(parts), torch.tensor([*map(len, parts)]).int())
    return handle


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    came: list[Tensor] = []
    counts = [len(tensor) // size()] * size() if splits is None else splits

    def run(of: list[Tensor]) -> list[Tensor]:
        found, rows = alltoall_async(of[0], counts, name, process_set).wait()
        came.append(rows)
        return [found]

    def gradient(of: list[Tensor]) -> list[Tensor]:
        return [alltoall(of[0], came[0], _of_gradient(name))[0]]

    (found,) = _Differentiable.apply(run, gradient, tensor)
    return found if splits is None else (found, came[0])


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: str = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **more: Any,
) -> Any:
    """This rank's rows of the reduced tensor; the first ranks have one more if need be."""
    more |= {"process_set": process_set, "scales": (prescale_factor, postscale_factor)}
    return _submit("reducescatter", tensor, name, option=op, **more)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """See ``reducescatter_async``; ``compression`` makes what travels."""
    scales = prescale_factor, postscale_factor

    def begin(of: Any) -> Any:
        return reducescatter_async(of, name, op, process_set, *scales, compression=compression)

    def gradient(of: list[Tensor]) -> list[Tensor]:
        factor = scales[0] * scales[1] * (size() if op == Sum else 1)
        return allgather([one * factor for one in of], _of_gradient(name, op))

    return _with_gradient(begin, gradient, tensor)


grouped_allreduce, grouped_allreduce_async = allreduce, allreduce_async
grouped_allreduce_, grouped_allreduce_async_ = allreduce_, allreduce_async_
grouped_allgather, grouped_allgather_async = allgather, allgather_async
grouped_reducescatter, grouped_reducescatter_async = reducescatter, reducescatter_async


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
