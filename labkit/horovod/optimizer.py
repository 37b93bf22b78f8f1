"""An optimizer that sums gradients over all ranks while backward still runs, as Horovod does it.

1. A hook on each parameter counts its backward passes. 2. After the last of a step it submits the
gradient under the parameter's name; the background thread reduces it while backward goes on.
3. Before ``step`` what no hook has submitted is, and all results are waited for. Ranks may finish
gradients in different orders; where a rank has none for a parameter it contributes zeros.

Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow"
(2018), section 4.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.collectives.common import Reduction
from labkit.horovod.negotiator import Handle, engine
from labkit.units import check_integer

Average, Sum = "mean", "sum"


class WrongOrder(ValueError, AssertionError):
    """Calls that would reduce wrong gradients (Horovod: AssertionError)."""


class Compression:
    """``compress(tensor)`` gives what travels and a context, for ``decompress(tensor, context)``.

    On our ring, partial sums of 16-bit floats travel as float32 (``share_reduce``), so ``fp16``
    saves a quarter of the bytes of float32, not a half.
    """

    none: "Compression"
    fp16: "Compression"

    def __init__(self, halves: bool):
        self.halves = halves

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        halved = tensor.half() if self.halves and tensor.is_floating_point() else tensor
        return halved, tensor.dtype

    def decompress(self, tensor: Tensor, context: torch.dtype) -> Tensor:
        return tensor.to(context)


Compression.none, Compression.fp16 = Compression(False), Compression(True)


def sparse_allreduce_async(tensor: Tensor, name: str | None = None, op: str = Average) -> Handle:
    """Reduce a sparse tensor: all ranks get the indices and values of all, added up."""
    mine = tensor.detach().coalesce()
    indices, values = name and f"{name}.indices", name and f"{name}.values"
    where = engine().submit("allgather", indices, mine.indices().t(), torch.cat)

    def take(parts: list[Tensor]) -> Tensor:
        # 16-bit floats are added up in float32.
        wide = Reduction.of("sum", mine.values()).wide
        found = torch.cat(parts).to(wide) / (len(parts) if op == Average else 1)
        summed = torch.sparse_coo_tensor(where.wait().t(), found, tensor.shape).coalesce()
        return summed.to(tensor.device, tensor.dtype)

    return engine().submit("allgather", values, mine.values(), take)


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
) -> Any:
    """``optimizer``, whose ``step`` uses gradients that were reduced while backward still ran.

    It gets ``synchronize()``, after which gradients are reduced, ``skip_synchronize()``, a context
    for the ``step`` after that, and ``set_backward_passes_per_step(passes)``.

    Args:
        named_parameters: names by which the ranks agree; by default their order counts.
        compression: ``Compression.none`` or ``Compression.fp16``, see there.
        backward_passes_per_step: after how many passes a gradient is reduced; they add up.
        op: Average or Sum.
        gradient_predivide_factor: divides before an average, and multiplies after it.
        num_groups, groups: no effect, as what is ready at the same time is fused anyway.
        sparse_as_dense: whether sparse gradients are reduced as dense ones; they end sparse.

    Raises:
        ValueError: an argument that is none of these; says which.
    """
    if op not in (Average, Sum) or not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"DistributedOptimizer takes an optimizer of torch.optim, not {optimizer!r:.60}, and "
            f"op=hvd.Average or hvd.Sum, not {op!r}"
        )
    if gradient_predivide_factor <= 0 or (op != Average and gradient_predivide_factor != 1):
        raise ValueError("gradient_predivide_factor is above 0, and for op=hvd.Average")
    check_integer("backward_passes_per_step", backward_passes_per_step)
    names: dict[Tensor, str] = {}
    if named_parameters is not None:
        pairs = [one for one in named_parameters if isinstance(one, tuple)]
        names = {parameter: name for name, parameter in pairs}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not names.keys() >= set(parameters) or len(set(names.values())) < len(pairs):
            raise ValueError(
                "named_parameters leave out parameters of the optimizer, or give two the same "
                "name: use model.named_parameters() of the whole model, or leave them out"
            )
    passes = backward_passes_per_step
    found: Any = optimizer
    gradients = Gradients(
        optimizer, names, compression, passes, op, gradient_predivide_factor, sparse_as_dense
    )
    found.register_step_pre_hook(gradients.before_step)
    found.synchronize, found.skip_synchronize = gradients.synchronize, gradients.skip
    found.zero_grad, found.set_backward_passes_per_step = gradients.zero_grad, gradients.set_passes
    return found


@dataclass(eq=False)
class Gradients:
    """The gradients of an optimizer's parameters, on their way to the average."""

    optimizer: Optimizer
    names: dict[Tensor, str]
    compression: Any
    passes: int
    op: str
    factor: float
    sparse_as_dense: bool
    is_synchronized: bool = False
    synchronizes: bool = True

    def __post_init__(self) -> None:
        # By parameter: the passes before its gradient is submitted, and what was submitted.
        self.left: dict[Tensor, int] = {}
        self.under_way: dict[Tensor, Handle] = {}
        self.clear = self.optimizer.zero_grad
        self.watch()

    def watch(self) -> None:
        """Hook the parameters that need gradients and have no hook yet."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        for number, parameter in enumerate(parameters):
            if parameter.requires_grad and parameter not in self.left:
                self.names.setdefault(parameter, f"noname.{number}")
                self.left[parameter] = self.passes
                parameter.register_post_accumulate_grad_hook(self.passed)

    def set_passes(self, passes: int) -> None:
        check_integer("backward_passes_per_step", passes)
        self.passes, self.left = passes, dict.fromkeys(self.left, passes)

    def passed(self, parameter: Tensor) -> None:
        if self.left[parameter] == 0:
            raise WrongOrder(
                f"the gradient of {self.names[parameter]!r} was computed more than "
                f"backward_passes_per_step={self.passes} times before step() or synchronize(): "
                "set it to the number of backward passes in a step"
            )
        self.left[parameter] -= 1
        if self.left[parameter] == 0:
            self.submit(parameter)

    def submit(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        name = self.names[parameter]
        if parameter.grad.is_sparse and not self.sparse_as_dense:
            self.under_way[parameter] = sparse_allreduce_async(parameter.grad, name, self.op)
            return
        # Optimizers such as SparseAdam take sparse gradients alone.
        sparse_dim = parameter.grad.sparse_dim() if parameter.grad.is_sparse else 0
        gradient = parameter.grad.to_dense() if sparse_dim else parameter.grad
        factor = self.factor
        divided = gradient if factor == 1 else gradient / factor
        small, context = self.compression.compress(divided)

        def take(found: Tensor) -> Tensor:
            gradient.copy_(self.compression.decompress(found, context))
            if factor != 1:
                gradient.mul_(factor)
            return gradient.to_sparse(sparse_dim) if sparse_dim else gradient

        self.under_way[parameter] = engine().submit("allreduce", name, small, take, self.op)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait until all gradients are reduced."""
        self.watch()
        try:
            for parameter in self.left:
                if parameter not in self.under_way:
                    self.submit(parameter)
            for parameter, handle in self.under_way.items():
                parameter.grad = handle.wait()
        finally:
            self.under_way.clear()
            self.left = dict.fromkeys(self.left, self.passes)
        self.is_synchronized = True

    @contextlib.contextmanager
    def skip(self) -> Iterator[None]:
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def before_step(self, optimizer: Optimizer, args: Any, options: Any) -> Any:
        """Reduce the gradients; those of a closure are reduced in it."""
        closure = options.get("closure", args[1] if len(args) > 1 else None)

        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            self.is_synchronized = False
            return loss

        if self.synchronizes and self.is_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after "
                "synchronize(): it reduces the gradients once more, which takes time",
                stacklevel=4,
            )
        if self.synchronizes and closure is not None:
            return (optimizer, reduced), {}
        if self.synchronizes:
            self.synchronize()
        self.is_synchronized = False
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        if any(left != self.passes for left in self.left.values()):
            raise WrongOrder(
                "zero_grad() between backward() and step() or synchronize() would clear gradients "
                "that are to be reduced: call it after step(), and after an exception in backward "
                "after synchronize()"
            )
        self.clear(set_to_none)
