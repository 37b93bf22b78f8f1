"""An optimizer that sums gradients over all ranks while backward still runs, as Horovod does it.

1. A hook on each parameter counts its backward passes. 2. After the last of a step it submits the
gradient under the parameter's name; the background thread reduces it while backward goes on.
3. Before ``step`` what no hook has submitted is, and all results are waited for. Ranks may finish
gradients in different orders; where a rank has none for a parameter it contributes zeros.

Source: as ``labkit.horovod.coordinator``.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.horovod.negotiator import Handle, engine
from labkit.units import check_integer

Average = "mean"
Sum = "sum"


class WrongOrder(ValueError, AssertionError):
    """Calls that would reduce wrong gradients (Horovod: AssertionError)."""


class Compression:
    """The dtype in which floating-point numbers travel.

    ``fp16`` halves the bytes of what takes one hop (``fast_all_reduce``). On the ring partial sums
    of 16-bit floats travel as float32, and it saves a quarter.
    """

    none = None
    fp16 = torch.float16


def compress(tensor: Tensor, compression: torch.dtype | None) -> Tensor:
    if compression is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(compression)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: torch.dtype | None = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
) -> Any:
    """``optimizer``, whose ``step`` uses gradients that were reduced while backward still ran.

    It gets ``synchronize()``, after which gradients are reduced, and ``skip_synchronize()``, a
    context for the ``step`` after that.

    Args:
        named_parameters: names by which the ranks agree; without a name their order counts.
        compression: ``Compression.none`` or ``Compression.fp16``, see there.
        backward_passes_per_step: after how many passes a gradient is reduced; they add up.
        op: Average or Sum.
        gradient_predivide_factor: divides before an average, and multiplies after it.

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
    gradients = Gradients(
        optimizer=optimizer,
        names={parameter: name for name, parameter in named_parameters or ()},
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        factor=gradient_predivide_factor,
    )
    gradients.attach()
    return optimizer


@dataclass(eq=False)
class Gradients:
    """The gradients of an optimizer's parameters, on their way to the average."""

    optimizer: Any
    names: dict[Tensor, str]
    compression: torch.dtype | None
    passes: int
    op: str
    factor: float

    def attach(self) -> None:
        """Hook the optimizer and its parameters."""
        # By parameter: the passes before its gradient is submitted, and what was submitted.
        self.passes_left: dict[Tensor, int] = {}
        self.under_way: dict[Tensor, Handle] = {}
        self.synchronizes = True
        self.plain_zero_grad = self.optimizer.zero_grad
        self.optimizer.register_step_pre_hook(self.before_step)
        self.optimizer.synchronize = self.synchronize
        self.optimizer.skip_synchronize = self.skip_synchronize
        self.optimizer.zero_grad = self.zero_grad
        self.hook_parameters()

    def hook_parameters(self) -> None:
        """Hook the parameters that need gradients and have no hook yet."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        for number, parameter in enumerate(itertools.chain(*groups)):
            if parameter.requires_grad and parameter not in self.passes_left:
                self.names.setdefault(parameter, f"noname.{number}")
                self.passes_left[parameter] = self.passes
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter: Tensor) -> None:
        if self.passes_left[parameter] == 0:
            raise WrongOrder(
                f"the gradient of {self.names[parameter]!r} was computed more than "
                f"backward_passes_per_step={self.passes} times before step() or synchronize(): "
                "set it to the number of backward passes in a step"
            )
        self.passes_left[parameter] -= 1
        if self.passes_left[parameter] == 0:
            self.submit(parameter)

    def submit(self, parameter: Tensor) -> None:
        name = self.names[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise ValueError(
                f"the gradient of {name!r} is sparse: make the layer with sparse=False"
            )
        outgoing = compress(parameter.grad / self.factor, self.compression)
        self.under_way[parameter] = engine().submit("allreduce", name, outgoing, self.op)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait until all gradients are reduced."""
        self.hook_parameters()
        try:
            for parameter in self.passes_left:
                if parameter not in self.under_way:
                    self.submit(parameter)
            for parameter, handle in self.under_way.items():
                parameter.grad = handle.wait().to(parameter.dtype) * self.factor
        finally:
            self.under_way.clear()
            self.passes_left = dict.fromkeys(self.passes_left, self.passes)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def before_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if any(map(callable, [*args[1:], *options.values()])):
            raise ValueError("step() takes no closure here: call backward() before it")
        if self.synchronizes:
            self.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if any(left != self.passes for left in self.passes_left.values()):
            raise WrongOrder(
                "zero_grad() between backward() and step() or synchronize() would clear gradients "
                "that are to be reduced: call it after step(), and after an exception in backward "
                "after synchronize()"
            )
        self.plain_zero_grad(set_to_none)
