"""Negotiated collectives on tensors and objects, with gradients, for ``labkit.horovod``.

The gradient of a collective is another collective: of an all-gather the own rows of the averaged
gradients, of a broadcast their average on the root, of an all-to-all the same way back, of a
reduce-scatter the all-gather, times P for a sum. These factors are Horovod 0.28's, as scripts that
rely on them are. (The derivative of the sum of all ranks' losses has the sum in place of these
averages, and no P; a sum over ranks alone, an all-reduce, follows it.)

Symbols: P ranks.
"""

import itertools
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
            means = self.reduced(of, of_gradient(name), reduction())
            return tuple(one.split(each)[self.rank] for one, each in zip(means, counts))

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.grouped_allgather_async(values, name).wait())

        return list(Differentiable.apply(run, gradient, *tensors))

    def sparse_allreduce_async(
        self, tensor: Tensor, name: str | None = None, op: str = Average
    ) -> "SparseHandle":
        """Reduce a sparse tensor: all ranks get the indices and values of all."""
        mine = tensor.detach().coalesce()
        scale = 1 / self.size if op == Average else 1
        rows = self.allgather_async(mine.indices().t().contiguous(), name and f"{name}.indices")
        values = self.allgather_async(mine.values(), name and f"{name}.values")
        return SparseHandle(rows, values, scale, tensor.shape)

    def broadcast_async(
        self, tensor: Tensor, root_rank: int, name: str | None = None, *, in_place: bool = False
    ) -> Handle:
        return self.begin("broadcast", name, [tensor], root=root_rank, in_place=in_place)

    def broadcast(self, tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
        """The root's values, in a new tensor."""

        def gradient(of: Tensor) -> Tensor:
            (mean,) = self.reduced([of], of_gradient(name), reduction())
            return mean if self.rank == root_rank else torch.zeros_like(mean)

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
            scale = told["prescale"] * told["postscale"] * (self.size if op == Sum else 1)
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
        if not optimizer.state:
            # A step on zeros is how Horovod makes a state, and scripts find these gradients.
            for parameter in itertools.chain(*(g["params"] for g in optimizer.param_groups)):
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
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


class GlobalBatch(sync_batch_norm.GlobalBatch):
    """What ranks tell each other about their batches, here through the background thread."""

    def __init__(self, operations: Operations, layer: torch.nn.Module):
        super().__init__(operations.opened.comm, layer, range(operations.size))
        self._operations = operations

    def gathered(self, mine: Tensor) -> Tensor:
        return self._operations.allgather_async(mine[None]).wait()
