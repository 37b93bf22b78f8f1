"""Negotiated collectives on tensors and objects, with gradients, for ``labkit.horovod``.

The gradient of a collective is another collective, since a rank's input is in every rank's output:
of a sum over ranks the sum of their gradients, of an all-gather the own rows of that sum, of a
broadcast that sum on the root, of an all-to-all the same way back, of a reduce-scatter the
all-gather. It goes by the name of the forward one, so ranks may run backward in different orders.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.collectives.common import check_root
from labkit.collectives.handle import Handle
from labkit.collectives.negotiated import Negotiator
from labkit.collectives.requests import JOIN, Request
from labkit.runtime.script import Opened
from labkit.strategies import sync_batch_norm
from labkit.strategies.by_name.compression import Compression

Average, Sum, Adasum, Min, Max, Product = "mean", "sum", "adasum", "min", "max", "product"


class Operations:
    """The collectives of one rank, from ``init`` to ``shutdown``; arguments are Horovod's.

    ``..._async`` submits and returns a ``Handle``; the others wait for the result. A name says
    what belongs together on all ranks; without one, the order of the calls does.

    Attributes:
        opened: the other ranks.
        engine: the thread that carries everything out.
    """

    def __init__(self, opened: Opened):
        self.opened, self.engine = opened, Negotiator(opened.comm)
        self.rank, self.size, self.hosts = opened.comm.rank, opened.comm.world_size, opened.hosts
        self._numbers: dict[str, itertools.count[int]] = {}

    def begin(
        self,
        kind: str,
        name: str | None,
        tensors: Sequence[Tensor] = (),
        take: Callable[[Any], Any] = lambda found: found and found[0],
        **told: Any,
    ) -> Handle:
        """Submit a collective.

        Args:
            take: makes the result from the list of results; by default the first of them.
            told: more of the ``Request``.
        """
        if name is None:
            name = f"noname.{next(self._numbers.setdefault(kind, itertools.count(1)))}"
        request = Request.of(f"{kind}.{name}", kind, tensors, **told)
        return self.engine.submit(request, tensors, take)

    def allreduce_async(
        self,
        tensor,
        average=None,
        name=None,
        op=None,
        *scales,
        in_place=False,
        has_value=True,
        **more,
    ) -> Handle:
        """Reduce a tensor; ``scales`` are prescale_factor and postscale_factor."""
        told = _told(average, op, *scales, **more) | {"has_value": has_value}
        return self.begin("allreduce", name, [tensor], in_place=in_place, **told)

    def grouped_allreduce_async(
        self, tensors, average=None, name=None, op=None, *scales, in_place=False, **more
    ) -> Handle:
        """Reduce a list of tensors in one step."""
        told = _told(average, op, *scales, **more)
        return self.begin("allreduce", name, list(tensors), list, in_place=in_place, **told)

    def allreduce(self, tensor, *args, **more) -> Tensor:
        """A new tensor; arguments as ``grouped_allreduce``."""
        return self.grouped_allreduce([tensor], *args, **more)[0]

    def grouped_allreduce(
        self,
        tensors,
        average=None,
        name=None,
        compression=Compression.none,
        op=None,
        *scales,
        **more,
    ) -> list[Tensor]:
        """New tensors, reduced in one step; what travels is made by ``compression``."""
        small, contexts = zip(*map(compression.compress, tensors))
        found = self._reduced(small, name, _told(average, op, *scales, **more))
        return list(map(compression.decompress, found, contexts))

    def _reduced(
        self, tensors: Sequence[Tensor], name: str | None, told: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        def run(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.begin("allreduce", name, values, list, **told).wait())

        def gradient(*of: Tensor) -> tuple[Tensor, ...]:
            _check_has_gradient(told["op"])
            return self._reduced(of, _of_gradient(name), told)

        return _Differentiable.apply(run, gradient, *tensors)

    def allgather_async(self, tensor, name=None) -> Handle:
        return self.begin("allgather", name, [tensor])

    def allgather(self, tensor, name=None) -> Tensor:
        """All ranks' tensors, one below the other; their first dimensions may differ."""

        def gradient(of: Tensor) -> Tensor:
            rows = self.allgather(torch.tensor([len(tensor)]), name and f"{name}.rows").tolist()
            return self._summed(of, name).split(rows)[self.rank]

        return _Differentiable.apply(
            lambda one: self.allgather_async(one, name).wait(), gradient, tensor
        )

    def broadcast_async(self, tensor, root_rank, name=None, *, in_place=False) -> Handle:
        return self.begin("broadcast", name, [tensor], root=root_rank, in_place=in_place)

    def broadcast(self, tensor, root_rank, name=None) -> Tensor:
        """The root's values, in a new tensor."""

        def gradient(of: Tensor) -> Tensor:
            total = self._summed(of, name)
            return total if self.rank == root_rank else torch.zeros_like(total)

        return _Differentiable.apply(
            lambda one: self.broadcast_async(one, root_rank, name).wait(), gradient, tensor
        )

    def alltoall_async(self, tensor, splits=None, name=None) -> Handle:
        """Send ``splits[r]`` rows to rank r, by default equal parts; see ``alltoall``."""
        rows = len(tensor) if tensor.dim() else 0
        if splits is None and rows % self.size:
            raise ValueError(
                f"{rows} rows cannot be split evenly over {self.size} ranks: give splits"
            )
        parts = [rows // self.size] * self.size if splits is None else list(map(int, splits))
        take = {} if splits is None else {"take": tuple}
        return self.begin("alltoall", name, [tensor], splits=parts, **take)

    def alltoall(self, tensor, splits=None, name=None) -> Tensor | tuple[Tensor, Tensor]:
        """The rows that all ranks send here; with ``splits`` also how many came from each."""
        came: list[Tensor] = []

        def run(one: Tensor) -> Tensor:
            found = self.alltoall_async(one, splits, name).wait()
            came.extend(found[1:] if splits is not None else [])
            return found if splits is None else found[0]

        def gradient(of: Tensor) -> Tensor:
            found = self.alltoall(of, came[0] if came else None, _of_gradient(name))
            return found[0] if came else found

        found = _Differentiable.apply(run, gradient, tensor)
        return found if splits is None else (found, came[0])

    def reducescatter_async(self, tensor, name=None, op=Average, *scales, **more) -> Handle:
        return self.begin("reducescatter", name, [tensor], **_told(None, op, *scales, **more))

    def reducescatter(
        self, tensor, name=None, compression=Compression.none, op=Average, *scales, **more
    ) -> Tensor:
        """This rank's rows of the reduced tensor; the first ranks have one more if need be."""
        told = _told(None, op, *scales, **more)
        small, context = compression.compress(tensor)

        def gradient(of: Tensor) -> Tensor:
            _check_has_gradient(op)
            scale = told["prescale"] * told["postscale"] / (self.size if op == Average else 1)
            return self.allgather(of * scale, _of_gradient(name))

        found = _Differentiable.apply(
            lambda one: self.begin("reducescatter", name, [one], **told).wait(), gradient, small
        )
        return compression.decompress(found, context)

    def _summed(self, gradient: Tensor, name: str | None) -> Tensor:
        return self._reduced([gradient], _of_gradient(name), _told(op=Sum))[0]

    def barrier(self) -> None:
        """Wait until all ranks have come."""
        self.begin("barrier", "all").wait()

    def join(self, device: int = -1) -> int:
        """Contribute zeros until all ranks have joined; returns the rank that came last."""
        return self.engine.submit(Request(JOIN, JOIN)).wait()

    def allgather_object(self, obj: Any, name: str | None = None) -> list[Any]:
        """All ranks' objects, by rank, see ``Opened.dump``."""
        data = torch.frombuffer(bytearray(self.opened.dump(obj)), dtype=torch.uint8)
        lengths = self.allgather(torch.tensor([len(data)]), name and f"{name}.bytes").tolist()
        parts = self.allgather(data, name).split(lengths)
        return [self.opened.load(part.numpy().tobytes()) for part in parts]

    def broadcast_object(self, obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
        """The root's object; on the root the object itself."""
        check_root(self.engine.comm, root_rank)
        found = self.allgather_object(obj if self.rank == root_rank else None, name)
        return obj if self.rank == root_rank else found[root_rank]

    def end(self) -> None:
        """Leave the other ranks."""
        self.engine.end(drain=not self.opened.has_failed)
        self.opened.close()


class GlobalBatch(sync_batch_norm.GlobalBatch):
    """What ranks tell each other about their batches, here through the background thread."""

    def __init__(self, operations: Operations, layer: torch.nn.Module):
        super().__init__(operations.opened.comm, layer, range(operations.size))
        self._operations = operations

    def gathered(self, mine: Tensor) -> Tensor:
        return self._operations.allgather_async(mine[None]).wait()


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


def _told(average=None, op=None, prescale_factor=1.0, postscale_factor=1.0) -> dict[str, Any]:
    """The reduction, for a ``Request``.

    Raises:
        ValueError: two ways to say it, or Adasum.
    """
    if average is not None and op is not None:
        raise ValueError("give op or average (its older name), not both")
    if op == Adasum:
        raise ValueError("op=hvd.Adasum is not here: use hvd.Average, or hvd.Sum and a smaller lr")
    op = op or (Sum if average is False else Average)
    return {"op": op, "prescale": float(prescale_factor), "postscale": float(postscale_factor)}


def _check_has_gradient(op: str) -> None:
    if op not in (Average, Sum):
        raise ValueError(
            f"the {op} over ranks has no gradient here: use op=hvd.Sum or hvd.Average"
        )


def _of_gradient(name: str | None) -> str | None:
    return name and f"{name}.gradient"
