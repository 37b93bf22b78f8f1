"""Negotiated reductions with gradients, and what belongs to all collectives by name.

The gradient of a sum over ranks is the sum of their gradients, since each rank's input is in the
output of all of them. It goes by the name of the forward one, so that ranks may run backward in
different orders.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.collectives.handle import Handle
from labkit.collectives.negotiated import Negotiator
from labkit.collectives.requests import JOIN, Request
from labkit.runtime.script import Opened
from labkit.strategies.by_name.compression import Compression

Average, Sum, Adasum, Min, Max, Product = "mean", "sum", "adasum", "min", "max", "product"


class Reductions:
    """Reductions of one rank, from ``init`` to ``shutdown``; arguments are Horovod's.

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
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            kinds = ", ".join(type(tensor).__name__ for tensor in tensors)
            raise ValueError(f"{kind} is for tensors, got {kinds}: use torch.tensor(...)")
        request = Request.of(f"{kind}.{name}", kind, tensors, **told)
        return self.engine.submit(request, tensors, take)

    def allreduce_async(
        self,
        tensor: Tensor,
        average: bool | None = None,
        name: str | None = None,
        op: str | None = None,
        *scales: float,
        in_place: bool = False,
        has_value: bool = True,
        **more: float,
    ) -> Handle:
        """Reduce a tensor; ``scales`` are prescale_factor and postscale_factor."""
        told = reduction(average, op, *scales, **more) | {"has_value": has_value}
        return self.begin("allreduce", name, [tensor], in_place=in_place, **told)

    def grouped_allreduce_async(
        self,
        tensors: Sequence[Tensor],
        average: bool | None = None,
        name: str | None = None,
        op: str | None = None,
        *scales: float,
        in_place: bool = False,
        **more: float,
    ) -> Handle:
        """Reduce a list of tensors in one step."""
        told = reduction(average, op, *scales, **more)
        return self.begin("allreduce", name, list(tensors), list, in_place=in_place, **told)

    def allreduce(self, tensor: Tensor, *args: Any, **more: Any) -> Tensor:
        """A new tensor; arguments as ``grouped_allreduce``."""
        return self.grouped_allreduce([tensor], *args, **more)[0]

    def grouped_allreduce(
        self,
        tensors: Sequence[Tensor],
        average: bool | None = None,
        name: str | None = None,
        compression: Any = Compression.none,
        op: str | None = None,
        *scales: float,
        **more: float,
    ) -> list[Tensor]:
        """New tensors, reduced in one step; what travels is made by ``compression``."""
        small, contexts = compressed(compression, tensors)
        found = self.reduced(small, name, reduction(average, op, *scales, **more))
        return list(map(compression.decompress, found, contexts))

    def reduced(
        self, tensors: Sequence[Tensor], name: str | None, told: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """The tensors reduced as ``told``, with gradients."""

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.begin("allreduce", name, values, list, **told).wait())

        def gradient(*of: Tensor) -> tuple[Tensor, ...]:
            check_has_gradient(told["op"])
            return self.reduced(of, of_gradient(name), told)

        return Differentiable.apply(run, gradient, *tensors)

    def barrier(self) -> None:
        """Wait until all ranks have come."""
        self.begin("barrier", "all").wait()

    def join(self, device: int = -1) -> int:
        """Contribute zeros until all ranks have joined; returns the rank that came last."""
        last = self.engine.submit(Request(JOIN, JOIN)).wait()
        # Ranks that have joined early have called less; now all are at the same point.
        self._numbers.clear()
        return last

    def end(self) -> None:
        """Leave the other ranks."""
        self.engine.end(drain=not self.opened.has_failed)
        self.opened.close()


class Differentiable(torch.autograd.Function):
    """``run(*tensors)`` forward, and ``gradient(*gradients)`` backward."""

    @staticmethod
    def forward(ctx: Any, run: Any, gradient: Any, *tensors: Tensor) -> Any:
        ctx.gradient = gradient
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = ctx.gradient(*gradients)
        return None, None, *(found if isinstance(found, tuple) else (found,))


def reduction(
    average: bool | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> dict[str, Any]:
    """The reduction, for a ``Request``.

    Raises:
        ValueError: two ways to say it, or Adasum.
    """
    if average is not None and op is not None:
        raise ValueError("give op or average (its older name), not both")
    if op == Adasum:
        raise ValueError("op=hvd.Adasum is not here: use hvd.Average, or hvd.Sum and a smaller lr")
    if not (math.isfinite(prescale_factor) and math.isfinite(postscale_factor)):
        raise ValueError(f"factors are finite, got {prescale_factor} and {postscale_factor}")
    op = op or (Sum if average is False else Average)
    return {"op": op, "prescale": float(prescale_factor), "postscale": float(postscale_factor)}


def check_has_gradient(op: str) -> None:
    """Raise ValueError for a reduction that is not linear."""
    if op not in (Average, Sum):
        raise ValueError(
            f"the {op} over ranks has no gradient here: use op=hvd.Sum or hvd.Average"
        )


def compressed(
    compression: Any, tensors: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """What travels in place of the tensors, and the contexts that ``decompress`` needs."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    return tuple(small for small, _ in pairs), tuple(context for _, context in pairs)


def of_gradient(name: str | None) -> str | None:
    """The name of the gradient of what has this name."""
    return name and f"{name}.gradient"
