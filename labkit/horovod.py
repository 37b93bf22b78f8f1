"""Horovod's interface for PyTorch on our ring: ``import labkit.horovod as hvd``.

It works in a script that torchrun starts, inside ``labkit.run``, alone, and with ``hvd.run``. Ranks
may call in different orders: ``labkit.collectives.negotiated`` is what runs below. Arguments,
defaults and results are those of Horovod 0.28 (horovod.readthedocs.io/en/stable/api.html), without
process sets and Adasum. ``engine().comm`` counts the messages and bytes that this rank has sent.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from labkit.collectives.fused import JOIN, Request
from labkit.collectives.negotiated import Handle, NegotiationError, Negotiator
from labkit.comm.comm import Comm
from labkit.runtime import launch
from labkit.runtime.script import Opened, open_for
from labkit.strategies import distributed_optimizer, sync_batch_norm
from labkit.units import MOST_SECONDS

Average, Sum, Adasum, Min, Max, Product = "mean", "sum", "adasum", "min", "max", "product"
HorovodInternalError = NegotiationError
_opened: Opened | None = None
_engine: Negotiator | None = None
_numbers: dict[str, Any] = {}


def init(comm: Comm | Iterable[int] | None = None) -> None:
    """Join the other ranks, unless this rank has; ``comm``: a labkit Comm, or all ranks."""
    global _opened, _engine
    if is_initialized():
        return
    _opened = open_for("horovod", comm if isinstance(comm, Comm) else None, shutdown)
    _engine = Negotiator(_opened.comm)
    _numbers.clear()
    if not isinstance(comm, Comm | None) and list(comm) != list(range(size())):
        shutdown()
        raise ValueError(f"init(comm={comm!r}): all ranks take part here, leave comm out")


def shutdown() -> None:
    """Leave the other ranks; ``init`` joins them again."""
    global _opened, _engine
    opened, ended, _opened, _engine = _opened, _engine, None, None
    if opened is not None and ended is not None and opened.is_mine():
        ended.end(drain=not opened.has_failed)
        opened.close()


def is_initialized() -> bool:
    return _engine is not None


def engine() -> Negotiator:
    """The thread that carries everything out."""
    if _engine is None:
        raise ValueError("labkit.horovod has not been initialized: call hvd.init() first")
    return _engine


def _asked(question: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: question(engine() and _opened)


rank, size = _asked(lambda o: o.comm.rank), _asked(lambda o: o.comm.world_size)
local_rank, local_size = _asked(lambda o: o.local_rank), _asked(lambda o: o.local_size)
cross_rank, cross_size = _asked(lambda o: o.host), _asked(lambda o: len(o.hosts))
is_homogeneous = _asked(lambda o: len(set(map(len, o.hosts))) == 1)
mpi_built = mpi_enabled = mpi_threads_supported = nccl_built = ddl_built = ccl_built = lambda: (
    False
)
gloo_built = gloo_enabled = torch.distributed.is_gloo_available
cuda_built, rocm_built = torch.backends.cuda.is_built, lambda: torch.version.hip is not None


class Compression:
    """What travels instead of a gradient: ``none``, or ``fp16`` for floating-point tensors."""

    class none:
        compress = staticmethod(lambda tensor: (tensor, None))
        decompress = staticmethod(lambda tensor, dtype: tensor)

    class fp16:
        compress = staticmethod(
            lambda tensor: (tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype)
        )
        decompress = staticmethod(lambda tensor, dtype: tensor.to(dtype))


def _submit(kind: str, name: str | None, tensors: list[Tensor], take: Any = None, **told: Any):
    count = next(_numbers.setdefault(kind, itertools.count())) if name is None else None
    name = f"{kind}.noname.{count}" if name is None else f"{kind}.{name}"
    request = Request.of(name, kind.removeprefix("grouped_"), tensors, **told)
    return engine().submit(request, tensors, take or (lambda found: found[0]))


def _op(average: bool | None, op: str | None) -> str:
    if average is not None and op is not None:
        raise ValueError("give op or average (its older name), not both")
    if op == Adasum:
        raise ValueError("op=Adasum is not here: use op=hvd.Average, or Sum with a smaller lr")
    return op or (Sum if average is False else Average)


def _allreduce(grouped: bool, in_place: bool) -> Callable[..., Handle]:
    def submit(
        tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0
    ):
        told = {"op": _op(average, op), "prescale": float(prescale_factor)}
        told |= {"postscale": float(postscale_factor), "in_place": in_place}
        kind, tensors = ("grouped_allreduce", tensor) if grouped else ("allreduce", [tensor])
        return _submit(kind, name, list(tensors), list if grouped else None, **told)

    return submit


def synchronize(handle: Handle) -> Any:
    """Wait for an operation that ``..._async`` has begun, and return its result."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    return handle.is_done()


def _waits(submit: Callable[..., Handle]) -> Callable[..., Any]:
    return lambda *args, **options: submit(*args, **options).wait()


allreduce_async, allreduce_async_ = _allreduce(False, False), _allreduce(False, True)
grouped_allreduce_async, grouped_allreduce_async_ = _allreduce(True, False), _allreduce(True, True)
allreduce_, grouped_allreduce_ = _waits(allreduce_async_), _waits(grouped_allreduce_async_)


class _Differentiable(torch.autograd.Function):
    """``run(*tensors)`` forward, and ``gradient(*gradients)`` backward."""

    @staticmethod
    def forward(ctx: Any, run: Any, gradient: Any, *tensors: Tensor) -> Any:
        ctx.gradient = gradient
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = ctx.gradient(*gradients)
        return None, None, *(found if isinstance(found, tuple) else (found,))


def grouped_allreduce(
    tensors,
    average=None,
    name=None,
    compression=Compression.none,
    op=None,
    prescale_factor=1.0,
    postscale_factor=1.0,
):
    """Reduce several tensors in one step; differentiable for averages and sums."""
    op, scales = _op(average, op), (prescale_factor, postscale_factor)
    small, contexts = zip(*map(compression.compress, tensors))

    def run(suffix: str, *values: Tensor) -> tuple[Tensor, ...]:
        if suffix and op not in (Average, Sum):
            raise ValueError(f"the {op} over ranks has no gradient here: use op=Average or Sum")
        named = name and name + suffix
        return tuple(grouped_allreduce_async(values, None, named, op, *scales).wait())

    backward = functools.partial(run, ".gradient")
    reduced = _Differentiable.apply(functools.partial(run, ""), backward, *small)
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts)]


def allreduce(tensor, *args, **options):
    """Reduce a tensor; arguments as ``grouped_allreduce``."""
    return grouped_allreduce([tensor], *args, **options)[0]


def allgather_async(tensor, name=None):
    """Put the tensors of all ranks one below the other; they may differ in their first dimension."""
    return _submit("allgather", name, [tensor])


def allgather(tensor, name=None):
    def gradient(of: Tensor) -> Tensor:
        rows = allgather(torch.tensor([len(tensor)]), name and f"{name}.rows").tolist()
        total = allreduce(of, name=name and f"{name}.gradient", op=Sum)
        return total.split(rows)[rank()]

    return _Differentiable.apply(lambda one: allgather_async(one, name).wait(), gradient, tensor)


def broadcast_async(tensor, root_rank, name=None, in_place=False):
    return _submit("broadcast", name, [tensor], root=root_rank, in_place=in_place)


broadcast_async_ = functools.partial(broadcast_async, in_place=True)
broadcast_ = _waits(broadcast_async_)


def broadcast(tensor, root_rank, name=None):
    def gradient(of: Tensor) -> Tensor:
        total = allreduce(of, name=name and f"{name}.gradient", op=Sum)
        return total if rank() == root_rank else torch.zeros_like(total)

    return _Differentiable.apply(
        lambda one: broadcast_async(one, root_rank, name).wait(), gradient, tensor
    )


def alltoall_async(tensor, splits=None, name=None):
    """Send ``splits[r]`` rows to rank r (by default equal parts), and receive from all."""
    if splits is None:
        rows = len(tensor) if tensor.dim() else 0
        if rows % size():
            raise ValueError(
                f"{rows} rows cannot be split evenly over {size()} ranks: give splits"
            )
        splits = [rows // size()] * size()
        return _submit("alltoall", name, [tensor], lambda found: found[0], splits=splits)
    device, splits = (
        splits.device if isinstance(splits, Tensor) else None,
        [int(n) for n in splits],
    )
    take = lambda found: (found[0], torch.tensor(found[1], dtype=torch.int32, device=device))
    return _submit("alltoall", name, [tensor], take, splits=splits)


def alltoall(tensor, splits=None, name=None):
    """The received rows; with ``splits`` also how many have come from each rank."""
    came: list[int] = []

    def run(one: Tensor) -> Tensor:
        parts = [one.shape[0] // size()] * size() if splits is None else splits
        found, rows = alltoall_async(one, parts, name).wait()
        came.extend(rows.tolist())
        return found

    back = lambda of: alltoall_async(of, came, name and f"{name}.gradient").wait()[0]
    found = _Differentiable.apply(run, back, tensor)
    return found if splits is None else (found, torch.tensor(came, dtype=torch.int32))


def reducescatter_async(tensor, name=None, op=Average, prescale_factor=1.0, postscale_factor=1.0):
    """Reduce, and keep this rank's rows of the result: the first ranks get one more if need be."""
    told = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return _submit("reducescatter", name, [tensor], op=_op(None, op), **told)


def reducescatter(
    tensor,
    name=None,
    compression=Compression.none,
    op=Average,
    prescale_factor=1.0,
    postscale_factor=1.0,
):
    scale = prescale_factor * postscale_factor / (size() if op == Average else 1)
    small, context = compression.compress(tensor)
    run = lambda one: reducescatter_async(one, name, op, prescale_factor, postscale_factor).wait()
    back = lambda of: allgather(of * scale, name and f"{name}.gradient")
    return compression.decompress(_Differentiable.apply(run, back, small), context)


def barrier() -> None:
    """Wait until all ranks have called this."""
    _submit("barrier", "all", [], lambda found: None).wait()


def join(device: int = -1) -> int:
    """Contribute zeros from now on, until all ranks have joined; returns the one that came last."""
    return engine().submit(Request(JOIN, JOIN)).wait()


def DistributedOptimizer(
    optimizer,
    named_parameters=None,
    compression=Compression.none,
    backward_passes_per_step=1,
    op=Average,
    gradient_predivide_factor=1.0,
    num_groups=0,
    groups=None,
    sparse_as_dense=False,
):
    """``optimizer`` with ``step`` on gradients reduced over all ranks, while backward still runs."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor is for op=Average alone: leave it out")
    factors = {"prescale": 1 / gradient_predivide_factor, "postscale": gradient_predivide_factor}
    factors |= {"op": _op(None, op)}

    def submit(name: str, tensor: Tensor, has_value: bool) -> Callable[[], Tensor | None]:
        told = {"has_value": has_value, "in_place": has_value, **factors}
        return _submit("allreduce", name, [tensor], lambda found: found and found[0], **told).wait

    named = None if named_parameters is None else list(named_parameters)
    return distributed_optimizer.distributed(
        optimizer, named, submit, backward_passes_per_step, compression, sparse_as_dense
    )


def broadcast_parameters(params, root_rank: int) -> None:
    """Copy a state dict, named parameters or a list of tensors from the root, in place."""
    named = sorted(params.items()) if isinstance(params, dict) else list(params)
    pairs = [one if isinstance(one, tuple) else (None, one) for one in named]
    begun = [broadcast_async_(p, root_rank, name) for name, p in pairs if isinstance(p, Tensor)]
    for handle in begun:
        handle.wait()


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Copy the root's state of an optimizer, and options such as the learning rate."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "the state of LBFGS cannot be broadcast: its ranks must do the same steps"
        )
    state = broadcast_object(optimizer.state_dict(), root_rank, "optimizer_state")
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    found = allgather_object(obj if rank() == root_rank else None, name)
    return obj if rank() == root_rank else found[root_rank]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """All ranks' objects, pickled; between hosts only plain data (see SECURITY.md)."""
    assert _opened is not None
    data = torch.frombuffer(bytearray(_opened.dump(obj)), dtype=torch.uint8)
    lengths = allgather(torch.tensor([len(data)]), name and f"{name}.bytes").tolist()
    parts = allgather(data, name).split(lengths)
    return [_opened.load(part.numpy().tobytes()) for part in parts]


class _GlobalBatch(sync_batch_norm.GlobalBatch):
    def gathered(self, mine: Tensor) -> Tensor:
        return allgather_async(mine[None]).wait()


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """BatchNorm, of any number of dimensions, with the statistics of all ranks' batches."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.__dict__["global_batch"] = _GlobalBatch(engine().comm, self, range(size()))

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs at least 2 dimensions, got {input.dim()}")


def run(func, args=(), kwargs=None, np: int = 1, hosts=None, **launcher: Any) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``np`` ranks of this machine; returns their values."""
    call = lambda comm: func(*args, **(kwargs or {}))
    return launch.run(call, world_size=np, timeout_s=MOST_SECONDS).values
