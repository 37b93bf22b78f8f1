"""Negotiated collectives on tensors and objects, with gradients, for ``labkit.horovod``.

The gradient of a collective is another collective: of an all-gather the own rows of the summed
gradients, of a broadcast their sum on the root, of an all-to-all the same way back, of a
reduce-scatter the all-gather. That is the derivative of the sum of all ranks' losses. (Horovod
0.28 has the average in place of the sum for all-gathers and broadcasts, and P times as much for a
reduce-scatter.)
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.collectives.common import check_root
from labkit.collectives.handle import Handle
from labkit.strategies import sync_batch_norm
from labkit.strategies.by_name.compression import Compression
from labkit.strategies.by_name.reductions import (
    Average,
    Differentiable,
    Reductions,
    Sum,
    check_has_gradient,
    compressed,
    of_gradient,
    reduction,
)


class Operations(Reductions):
    """All collectives of one rank."""

    def allgather_async(self, tensor: Tensor, name: str | None = None) -> Handle:
        return self.begin("allgather", name, [tensor])

    def grouped_allgather_async(
        self, tensors: Sequence[Tensor], name: str | None = None
    ) -> Handle:
        return self.begin("allgather", name, list(tensors), list)

    def allgather(self, tensor: Tensor, name: str | None = None) -> Tensor:
        """All ranks' tensors, one below the other; their first dimensions may differ."""
        return self.grouped_allgather([tensor], name)[0]

    def grouped_allgather(
        self, tensors: Sequence[Tensor], name: str | None = None
    ) -> list[Tensor]:
        """The same of each of several tensors, in one step."""
        rows = [len(tensor) if tensor.dim() else 0 for tensor in tensors]

        def gradient(*of: Tensor) -> tuple[Tensor, ...]:
            counts = self.allgather(torch.tensor([rows]), name and f"{name}.rows").t().tolist()
            sums = self.reduced(of, of_gradient(name), reduction(op=Sum))
            return tuple(one.split(each)[self.rank] for one, each in zip(sums, counts))

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.grouped_allgather_async(values, name).wait())

        return list(Differentiable.apply(run, gradient, *tensors))

    def broadcast_async(
        self, tensor: Tensor, root_rank: int, name: str | None = None, *, in_place: bool = False
    ) -> Handle:
        return self.begin("broadcast", name, [tensor], root=root_rank, in_place=in_place)

    def broadcast(self, tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
        """The root's values, in a new tensor."""

        def gradient(of: Tensor) -> Tensor:
            (total,) = self.reduced([of], of_gradient(name), reduction(op=Sum))
            return total if self.rank == root_rank else torch.zeros_like(total)

        return Differentiable.apply(
            lambda one: self.broadcast_async(one, root_rank, name).wait(), gradient, tensor
        )

    def alltoall_async(
        self, tensor: Tensor, splits: Any = None, name: str | None = None
    ) -> Handle:
        """Send ``splits[r]`` rows to rank r, by default equal parts; see ``alltoall``."""
        take = {} if splits is None else {"take": tuple}
        splits = self._splits(tensor, splits)
        return self.begin("alltoall", name, [tensor], splits=splits, **take)

    def _splits(self, tensor: Tensor, splits: Any) -> list[int]:
        rows = len(tensor) if isinstance(tensor, Tensor) and tensor.dim() else 0
        if splits is None and rows % self.size:
            raise ValueError(
                f"{rows} rows cannot be split evenly over {self.size} ranks: give splits"
            )
        return [rows // self.size] * self.size if splits is None else [int(n) for n in splits]

    def alltoall(
        self, tensor: Tensor, splits: Any = None, name: str | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The rows that all ranks send here; with ``splits`` also how many came from each."""
        found, came = self._exchanged(tensor, self._splits(tensor, splits), name)
        return found if splits is None else (found, came)

    def _exchanged(
        self, tensor: Tensor, splits: list[int], name: str | None
    ) -> tuple[Tensor, Tensor]:
        came: list[Tensor] = []

        def run(one: Tensor) -> Tensor:
            found, rows = self.begin("alltoall", name, [one], list, splits=splits).wait()
            came.append(rows)
            return found

        def gradient(of: Tensor) -> Tensor:
            return self._exchanged(of, came[0].tolist(), of_gradient(name))[0]

        return Differentiable.apply(run, gradient, tensor), came[0]

    def reducescatter_async(
        self,
        tensor: Tensor,
        name: str | None = None,
        op: str = Average,
        *scales: float,
        **more: float,
    ) -> Handle:
        return self.begin("reducescatter", name, [tensor], **reduction(None, op, *scales, **more))

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[Tensor],
        name: str | None = None,
        op: str = Average,
        *scales: float,
        **more: float,
    ) -> Handle:
        told = reduction(None, op, *scales, **more)
        return self.begin("reducescatter", name, list(tensors), list, **told)

    def reducescatter(self, tensor: Tensor, *args: Any, **more: Any) -> Tensor:
        """This rank's rows of the reduced tensor; the first ranks have one more if need be."""
        return self.grouped_reducescatter([tensor], *args, **more)[0]

    def grouped_reducescatter(
        self,
        tensors: Sequence[Tensor],
        name: str | None = None,
        compression: Any = Compression.none,
        op: str = Average,
        *scales: float,
        **more: float,
    ) -> list[Tensor]:
        """The same of each of several tensors, in one step."""
        told = reduction(None, op, *scales, **more)
        small, contexts = compressed(compression, tensors)

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.begin("reducescatter", name, values, list, **told).wait())

        def gradient(*of: Tensor) -> tuple[Tensor, ...]:
            check_has_gradient(op)
            scale = told["prescale"] * told["postscale"] / (self.size if op == Average else 1)
            scaled = [one * scale for one in of]
            return tuple(self.grouped_allgather(scaled, of_gradient(name)))

        found = Differentiable.apply(run, gradient, *small)
        return list(map(compression.decompress, found, contexts))

    def broadcast_parameters(self, params: Any, root_rank: int) -> None:
        """Copy a state dict, named parameters or a list of tensors from the root, in place."""
        if not isinstance(params, Iterable):
            raise ValueError(f"params is a state dict, named parameters or a list, not {params!r}")
        listed = sorted(params.items()) if isinstance(params, dict) else list(params)
        named = [one if isinstance(one, tuple) else (None, one) for one in listed]
        begun = [
            self.broadcast_async(one, root_rank, name, in_place=True)
            for name, one in named
            # A state dict may hold other things, too.
            if isinstance(one, Tensor) or not isinstance(params, dict)
        ]
        for handle in begun:
            handle.wait()

    def broadcast_optimizer_state(
        self, optimizer: Optimizer, root_rank: int, model: Any = None
    ) -> None:
        """Copy the root's state, also an empty one, and options such as the learning rate."""
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"{optimizer!r:.60} is not an optimizer of torch.optim")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("the state of LBFGS cannot be broadcast: use another optimizer")
        state = self.broadcast_object(optimizer.state_dict(), root_rank, "optimizer_state")
        if self.rank != root_rank:
            optimizer.load_state_dict(state)

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


class GlobalBatch(sync_batch_norm.GlobalBatch):
    """What ranks tell each other about their batches, here through the background thread."""

    def __init__(self, operations: Operations, layer: torch.nn.Module):
        super().__init__(operations.opened.comm, layer, range(operations.size))
        self._operations = operations

    def gathered(self, mine: Tensor) -> Tensor:
        return self._operations.allgather_async(mine[None]).wait()
