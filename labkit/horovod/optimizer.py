"""An optimizer that sums gradients over all ranks while backward still runs, as Horovod does it.

1. A hook on each parameter counts its backward passes. 2. After the last of a step it submits the
gradient under the parameter's name; the background thread reduces it while backward goes on.
3. Before ``step`` what no hook has submitted is, and all results are waited for. Ranks may finish
gradients in different orders; where a rank has none for a parameter it contributes zeros.

Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow"
(2018), section 4.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.horovod.negotiator import Handle, engine
from labkit.units import check_integer

Average, Sum = "mean", "sum"


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


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
) -> Any:
    """``optimizer``, whose ``step`` uses gradients that were reduced while backward still ran.

    Args:
        named_parameters: names by which the ranks agree; by default their order counts.
        compression: ``Compression.none`` or ``Compression.fp16``, see there.
        backward_passes_per_step: after how many passes a gradient is reduced; they add up.
        op: Average or Sum.

    Raises:
        ValueError: an argument that is none of these; says which.
    """
    if op not in (Average, Sum) or not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"DistributedOptimizer takes an optimizer of torch.optim, not {optimizer!r:.60}, and "
            f"op=hvd.Average or hvd.Sum, not {op!r}"
        )
    check_integer("backward_passes_per_step", backward_passes_per_step)
    names: dict[Tensor, str] = {}
    if named_parameters is not None:
        pairs = list(named_parameters)
        names = {parameter: name for name, parameter in pairs}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not names.keys() >= set(parameters) or len(set(names.values())) < len(pairs):
            raise ValueError(
                "named_parameters leave out parameters of the optimizer, or give two the same "
                "name: use model.named_parameters() of the whole model, or leave them out"
            )
    found: Any = optimizer
    gradients = Gradients(optimizer, names, compression, backward_passes_per_step, op)
    found.register_step_pre_hook(gradients.before_step)
    found.zero_grad = gradients.zero_grad
    return found


@dataclass(eq=False)
class Gradients:
    """The gradients of an optimizer's parameters, on their way to the average."""

    optimizer: Optimizer
    names: dict[Tensor, str]
    compression: Any
    passes: int
    op: str

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

    def passed(self, parameter: Tensor) -> None:
        if self.left[parameter] == 0:
            raise ValueError(
                f"the gradient of {self.names[parameter]!r} was computed more than "
                f"backward_passes_per_step={self.passes} times before step(): set it to the "
                "number of backward passes in a step"
            )
        self.left[parameter] -= 1
        if self.left[parameter] == 0:
            self.submit(parameter)

    def submit(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient, name = parameter.grad, self.names[parameter]
        small, context = self.compression.compress(gradient)

        def take(found: Tensor) -> Tensor:
            return gradient.copy_(self.compression.decompress(found, context))

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

    def before_step(self, optimizer: Optimizer, args: Any, options: Any) -> Any:
        """Reduce the gradients; those of a closure are reduced in it."""
        closure = options.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.synchronize()
            return None

        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return (optimizer, reduced), {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        if any(left != self.passes for left in self.left.values()):
            raise ValueError(
                "zero_grad() between backward() and step() would clear gradients that are to be "
                "reduced: call it after step()"
            )
        self.clear(set_to_none)
