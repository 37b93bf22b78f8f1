"""Horovod's collectives on tensors and objects, with gradients; names and arguments are Horovod's.

``..._async`` submits and returns a ``Handle``; ``..._`` works in place; the others wait for the
result. A name says what belongs together on all ranks; without one, the order of the calls does.

The gradient of a collective is another collective, by the name of the forward one: of a sum over
ranks the sum of their gradients, of an all-gather the own rows of the averaged gradients, of a
broadcast their average on the root, of an all-to-all the same way back, of a reduce-scatter the
all-gather, times P for a sum. These factors are Horovod 0.28's, as scripts that rely on them are.
(The derivative of the sum of all ranks' losses has the sum in place of these averages, and no P.)

Symbols: P ranks.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.collectives.common import check_root
from labkit.comm.comm import Comm
from labkit.horovod.coordinator import JOIN, Request
from labkit.horovod.negotiator import Engine, Handle
from labkit.runtime.plain import dump_plain, load_plain
from labkit.runtime.torchrun import open_for
from labkit.strategies import sync_batch_norm

Average, Sum, Adasum, Min, Max, Product = "mean", "sum", "adasum", "min", "max", "product"
global_process_set = "all ranks"


class Joined:
    """What ``init`` has joined, until ``shutdown``: the other ranks and the thread."""

    def __init__(self, comm: Comm | None):
        self.opened = open_for("horovod", comm, shutdown)
        self.engine = Engine(self.opened.comm)
        # By kind, the number of the next collective without a name.
        self.numbers: dict[str, itertools.count[int]] = {}


_joined: Joined | None = None


def init(comm: Comm | Iterable[int] | None = None) -> None:
    """Join the other ranks, unless this one has. ``comm``: of ``labkit.run``, or all ranks."""
    global _joined
    if _joined is None:
        _joined = Joined(comm if isinstance(comm, Comm) else None)
    size = _joined.opened.comm.world_size
    if not isinstance(comm, Comm | None) and list(comm) not in ([], list(range(size))):
        raise ValueError(f"init({comm!r}): all {size} ranks take part, so call init() without it")


def shutdown() -> None:
    """Leave the other ranks; ``init`` joins them again."""
    global _joined
    ended, _joined = _joined, None
    if ended is not None and ended.opened.is_mine():
        ended.engine.end(drain=not ended.opened.has_failed)
        ended.opened.close()


def is_initialized() -> bool:
    return _joined is not None


def joined() -> Joined:
    """What ``init`` has joined.

    Raises:
        ValueError: ``init`` has not been called.
    """
    if _joined is None:
        raise ValueError("labkit.horovod has not been initialized: call hvd.init() first")
    return _joined


def engine() -> Engine:
    """The thread that carries everything out; its ``comm`` counts what is sent."""
    return joined().engine


class _Unchanged:
    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        return tensor


class _Half:
    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        return tensor.to(context)


class Compression:
    """``compress(tensor)`` gives what travels and a context, for ``decompress(tensor, context)``.

    On our ring, partial sums of 16-bit floats travel as float32 (``share_reduce``), so ``fp16``
    saves a quarter of the bytes of float32, not a half.
    """

    none, fp16 = _Unchanged(), _Half()


def _first(found: Any) -> Any:
    return found and found[0]


def _begin(
    kind: str,
    name: str | None,
    tensors: Sequence[Tensor] = (),
    take: Callable[[Any], Any] = _first,
    *,
    in_place: bool = False,
    process_set: Any = None,
    **more: Any,
) -> Handle:
    """Submit a collective; ``take`` makes the result from the list of results."""
    now = joined()
    if process_set not in (None, global_process_set):
        raise ValueError("all ranks take part here: leave process_set out")
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = ", ".join(type(tensor).__name__ for tensor in tensors)
        raise ValueError(f"{kind} is for tensors, got {kinds}: use torch.tensor(...)")
    if name is None:
        name = f"noname.{next(now.numbers.setdefault(kind, itertools.count(1)))}"
    request = Request.of(f"{kind}.{name}", kind, tensors, **more)
    return now.engine.submit(request, tensors, take, in_place)


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


def _reduction(average: bool | None, op: str | None, *scales: float) -> dict[str, Any]:
    """The reduction, for a ``Request``."""
    if average is not None and op is not None:
        raise ValueError("give op or average (its older name), not both")
    if op == Adasum:
        raise ValueError("op=hvd.Adasum is not here: use hvd.Average, or hvd.Sum and a smaller lr")
    if not all(map(math.isfinite, scales)):
        raise ValueError(f"factors are finite, got {scales[0]} and {scales[1]}")
    op = op or (Sum if average is False else Average)
    return {"op": op, "prescale": float(scales[0]), "postscale": float(scales[1])}


def _compressed(compression: Any, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """What travels in place of the tensors, and the contexts that ``decompress`` needs."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [small for small, _ in pairs], [context for _, context in pairs]


def _check_has_gradient(op: str) -> None:
    if op not in (Average, Sum):
        raise ValueError(
            f"the {op} over ranks has no gradient here: use op=hvd.Sum or hvd.Average"
        )


def _of_gradient(name: str | None) -> str | None:
    return name and f"{name}.gradient"


# ---- all-reduce


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    take: Callable[[Any], Any] = list,
    **more: Any,
) -> Handle:
    """Reduce a list of tensors in one step."""
    reduction = _reduction(average, op, prescale_factor, postscale_factor)
    return _begin("allreduce", name, list(tensors), take, **reduction, **more)


def grouped_allreduce_async_(tensors: Sequence[Tensor], *args: Any, **more: Any) -> Handle:
    return grouped_allreduce_async(tensors, *args, in_place=True, **more)


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **more: Any) -> list[Tensor]:
    return grouped_allreduce_async_(tensors, *args, **more).wait()


def allreduce_async(tensor: Tensor, *args: Any, **more: Any) -> Handle:
    """Reduce a tensor; arguments as ``grouped_allreduce_async``."""
    return grouped_allreduce_async([tensor], *args, take=_first, **more)


def allreduce_async_(tensor: Tensor, *args: Any, **more: Any) -> Handle:
    return allreduce_async(tensor, *args, in_place=True, **more)


def allreduce_(tensor: Tensor, *args: Any, **more: Any) -> Tensor:
    return allreduce_async_(tensor, *args, **more).wait()


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[Tensor]:
    """New tensors, reduced in one step; what travels is made by ``compression``."""
    small, contexts = _compressed(compression, tensors)
    reduction = _reduction(average, op, prescale_factor, postscale_factor)
    found = _reduced(small, name, reduction | {"process_set": process_set})
    return list(map(compression.decompress, found, contexts))


def _reduced(
    tensors: Sequence[Tensor], name: str | None, reduction: dict[str, Any]
) -> tuple[Tensor, ...]:
    def run(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(_begin("allreduce", name, values, list, **reduction).wait())

    def gradient(*of: Tensor) -> tuple[Tensor, ...]:
        _check_has_gradient(reduction["op"])
        return _reduced(of, _of_gradient(name), reduction)

    return _Differentiable.apply(run, gradient, *tensors)


def allreduce(tensor: Tensor, *args: Any, **more: Any) -> Tensor:
    """A new tensor; arguments as ``grouped_allreduce``."""
    return grouped_allreduce([tensor], *args, **more)[0]


# ---- all-gather, broadcast, all-to-all, reduce-scatter


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, **more: Any
) -> Handle:
    return _begin("allgather", name, list(tensors), list, **more)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, **more: Any
) -> list[Tensor]:
    """``allgather`` of each of several tensors, in one step."""
    mine = [len(tensor) if tensor.dim() else 0 for tensor in tensors]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(grouped_allgather_async(values, name, **more).wait())

    def gradient(*of: Tensor) -> tuple[Tensor, ...]:
        rows = allgather(torch.tensor([mine]), name and f"{name}.rows").t().tolist()
        means = _reduced(of, _of_gradient(name), _reduction(None, Average, 1.0, 1.0))
        rank = engine().comm.rank
        return tuple(one.split(counts)[rank] for one, counts in zip(means, rows))

    return list(_Differentiable.apply(run, gradient, *tensors))


def allgather_async(tensor: Tensor, name: str | None = None, **more: Any) -> Handle:
    return _begin("allgather", name, [tensor], **more)


def allgather(tensor: Tensor, name: str | None = None, **more: Any) -> Tensor:
    """All ranks' tensors, one below the other; their first dimensions may differ."""
    return grouped_allgather([tensor], name, **more)[0]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, **more: Any
) -> Handle:
    return _begin("broadcast", name, [tensor], root=root_rank, **more)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, **more: Any
) -> Handle:
    return broadcast_async(tensor, root_rank, name, in_place=True, **more)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, **more: Any) -> Tensor:
    return broadcast_async_(tensor, root_rank, name, **more).wait()


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, **more: Any) -> Tensor:
    """The root's values, in a new tensor."""

    def run(one: Tensor) -> Tensor:
        return broadcast_async(one, root_rank, name, **more).wait()

    def gradient(of: Tensor) -> Tensor:
        (mean,) = _reduced([of], _of_gradient(name), _reduction(None, Average, 1.0, 1.0))
        return mean if engine().comm.rank == root_rank else torch.zeros_like(mean)

    return _Differentiable.apply(run, gradient, tensor)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, **more: Any
) -> Handle:
    """Send ``splits[r]`` rows to rank r, by default equal parts; see ``alltoall``."""
    take = _first if splits is None else tuple
    return _begin("alltoall", name, [tensor], take, splits=_splits(tensor, splits), **more)


def _splits(tensor: Tensor, splits: Any) -> list[int]:
    size = engine().comm.world_size
    rows = len(tensor) if isinstance(tensor, Tensor) and tensor.dim() else 0
    if splits is None and rows % size:
        raise ValueError(f"{rows} rows cannot be split evenly over {size} ranks: give splits")
    return [rows // size] * size if splits is None else [int(n) for n in splits]


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, **more: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """The rows that all ranks send here; with ``splits`` also how many came from each."""
    found, came = _exchanged(tensor, _splits(tensor, splits), name, **more)
    return found if splits is None else (found, came)


def _exchanged(
    tensor: Tensor, splits: list[int], name: str | None, **more: Any
) -> tuple[Tensor, Tensor]:
    came: list[Tensor] = []

    def run(one: Tensor) -> Tensor:
        found, rows = _begin("alltoall", name, [one], list, splits=splits, **more).wait()
        came.append(rows)
        return found

    def gradient(of: Tensor) -> Tensor:
        return _exchanged(of, came[0].tolist(), _of_gradient(name))[0]

    return _Differentiable.apply(run, gradient, tensor), came[0]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    take: Callable[[Any], Any] = list,
    **more: Any,
) -> Handle:
    reduction = _reduction(None, op, prescale_factor, postscale_factor)
    return _begin("reducescatter", name, list(tensors), take, **reduction, **more)


def reducescatter_async(tensor: Tensor, *args: Any, **more: Any) -> Handle:
    return grouped_reducescatter_async([tensor], *args, take=_first, **more)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **more: Any,
) -> list[Tensor]:
    """``reducescatter`` of each of several tensors, in one step."""
    scales = prescale_factor, postscale_factor
    small, contexts = _compressed(compression, tensors)

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(grouped_reducescatter_async(values, name, op, *scales, **more).wait())

    def gradient(*of: Tensor) -> tuple[Tensor, ...]:
        _check_has_gradient(op)
        factor = math.prod(scales) * (engine().comm.world_size if op == Sum else 1)
        return tuple(grouped_allgather([one * factor for one in of], _of_gradient(name)))

    found = _Differentiable.apply(run, gradient, *small)
    return list(map(compression.decompress, found, contexts))


def reducescatter(tensor: Tensor, *args: Any, **more: Any) -> Tensor:
    """This rank's rows of the reduced tensor; the first ranks have one more if need be."""
    return grouped_reducescatter([tensor], *args, **more)[0]


# ---- what is made of these


def synchronize(handle: Any) -> Any:
    """Wait for the result of a handle, and return it."""
    return handle.wait()


def poll(handle: Any) -> bool:
    """Whether the result of a handle is there."""
    return handle.is_done()


def barrier(process_set: Any = None) -> None:
    """Wait until all ranks have come."""
    _begin("barrier", "all", process_set=process_set).wait()


def join(device: int = -1) -> int:
    """Contribute zeros until all ranks have joined; returns the rank that came last."""
    last = engine().submit(Request(JOIN, JOIN)).wait()
    # Ranks that have joined early have called less; now all are at the same point.
    joined().numbers.clear()
    return last


class SparseHandle:
    """A sparse all-reduce under way, as ``Handle``."""

    def __init__(self, rows: Handle, values: Handle, scale: float, shape: torch.Size):
        self._rows, self._values, self._scale, self._shape = rows, values, scale, shape

    def is_done(self) -> bool:
        return self._rows.is_done() and self._values.is_done()

    def wait(self) -> Tensor:
        """The reduced tensor, sparse: entries of several ranks at one place are added up."""
        indices, values = self._rows.wait().t(), self._values.wait() * self._scale
        found = torch.sparse_coo_tensor(indices, values, self._shape, check_invariants=True)
        return found.coalesce()

    # Horovod's is called.
    __call__ = wait


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: str = Average, **more: Any
) -> SparseHandle:
    """Reduce a sparse tensor: all ranks get the indices and values of all."""
    mine = tensor.detach().coalesce()
    scale = 1 / engine().comm.world_size if op == Average else 1
    rows = mine.indices().t().contiguous()
    return SparseHandle(
        allgather_async(rows, name and f"{name}.indices", **more),
        allgather_async(mine.values(), name and f"{name}.values", **more),
        scale,
        tensor.shape,
    )


def broadcast_parameters(params: Any, root_rank: int, process_set: Any = None) -> None:
    """Copy a state dict, named parameters or a list of tensors from the root, in place."""
    if not isinstance(params, Iterable):
        raise ValueError(f"params is a state dict, named parameters or a list, not {params!r}")
    is_dict = isinstance(params, dict)
    listed = sorted(params.items()) if is_dict else list(params)
    named = [one if isinstance(one, tuple) else (None, one) for one in listed]
    begun = [
        broadcast_async_(one, root_rank, name, process_set=process_set)
        for name, one in named
        # A state dict may hold other things, too.
        if isinstance(one, Tensor) or not is_dict
    ]
    for handle in begun:
        handle.wait()


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int, model: Any = None) -> None:
    """Copy the root's state, also an empty one, and options such as the learning rate."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"{optimizer!r:.60} is not an optimizer of torch.optim")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of LBFGS cannot be broadcast: use another optimizer")
    if not optimizer.state:
        # A step on zeros is how Horovod makes a state, and scripts find these gradients.
        for parameter in itertools.chain(*(g["params"] for g in optimizer.param_groups)):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    state = broadcast_object(optimizer.state_dict(), root_rank, "optimizer_state")
    if engine().comm.rank != root_rank:
        optimizer.load_state_dict(state)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """All ranks' objects, by rank: plain data, see ``labkit.runtime.plain``."""
    data = torch.frombuffer(bytearray(dump_plain(obj)), dtype=torch.uint8)
    lengths = allgather(torch.tensor([len(data)]), name and f"{name}.bytes").tolist()
    return [load_plain(part.numpy().tobytes()) for part in allgather(data, name).split(lengths)]


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object; on the root the object itself."""
    comm = engine().comm
    check_root(comm, root_rank)
    found = allgather_object(obj if comm.rank == root_rank else None, name)
    return obj if comm.rank == root_rank else found[root_rank]


class GlobalBatch(sync_batch_norm.GlobalBatch):
    """What ranks tell each other about their batches, here through the background thread."""

    def gathered(self, mine: Tensor) -> Tensor:
        return allgather_async(mine[None]).wait()
