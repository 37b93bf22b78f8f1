"""An optimizer that sums gradients over all ranks while backward still runs, as Horovod does it.

1. A hook on each parameter counts its backward passes. 2. After the last of a step it submits the
gradient under the parameter's name; the background thread reduces it while backward goes on.
3. Before ``step`` what no hook has submitted is, and all results are waited for. Ranks may finish
gradients in different orders; where a rank has none for a parameter it contributes zeros.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.horovod.negotiator import Handle, engine
from labkit.units import check_integer

Average = "mean"
Sum = "sum"


class Compression:
    """The dtype in which floating-point numbers travel.

    ``fp16`` halves the bytes of what takes one hop (``fast_all_reduce``). On the ring partial sums
    of 16-bit floats travel as float32, and it saves a quarter.
    """

    none = None
    fp16 = torch.float16


class Distributed(Optimizer):
    """The part that ``DistributedOptimizer`` adds to the class of an optimizer.

    Attributes:
        num_passes, under_way: by parameter its backward passes since the last step, and what was
            submitted.
    """

    names: dict[Tensor, str]
    compression: torch.dtype | None
    passes: int
    op: str
    factor: float
    synchronizes = True
    num_passes: Counter[Tensor]
    under_way: dict[Tensor, Handle]
    hooked: set[Tensor]

    def parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def hook_parameters(self) -> None:
        """Name and hook what trains and has no hook yet."""
        for number, parameter in enumerate(self.parameters()):
            self.names.setdefault(parameter, f"noname.{number}")
            if parameter.requires_grad and parameter not in self.hooked:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)
                self.hooked.add(parameter)

    def gradient_ready(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            name = self.names[parameter]
            raise ValueError(f"the gradient of {name!r} is sparse: give its layer sparse=False")
        self.num_passes[parameter] += 1
        if self.num_passes[parameter] > self.passes:
            raise AssertionError(
                f"the gradient of {self.names[parameter]!r} was computed more than "
                f"backward_passes_per_step={self.passes} times before step() or synchronize(): "
                "set it to the number of backward passes in a step"
            )
        if self.num_passes[parameter] == self.passes:
            self.submit(parameter)

    def submit(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad / self.factor
        if self.compression is not None:
            gradient = gradient.to(self.compression)
        name = self.names[parameter]
        self.under_way[parameter] = engine().submit("allreduce", name, gradient, self.op)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait until all gradients are reduced."""
        # A group may have been added, a layer unfrozen.
        self.hook_parameters()
        try:
            for parameter in self.parameters():
                if parameter.requires_grad and parameter not in self.under_way:
                    self.submit(parameter)
            for parameter, handle in self.under_way.items():
                parameter.grad = handle.wait().to(parameter.dtype) * self.factor
        finally:
            self.under_way.clear()
            self.num_passes.clear()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have ``step`` use the gradients as they are, which are reduced already."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def zero_grad(self, *args: Any, **options: Any) -> None:
        if self.under_way:
            raise AssertionError(
                "zero_grad() after backward() and before step() or synchronize() loses the "
                "gradients that are being reduced: call it before backward(), or after step()"
            )
        super().zero_grad(*args, **options)

    def before_step(self, args: Any, options: Any) -> None:
        if any(map(callable, [*args[1:], *options.values()])):
            # Its backward would come after the reduction.
            raise ValueError("step() takes no closure here: call backward() before it")
        if self.synchronizes:
            self.synchronize()


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
    """
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise ValueError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {kind}")
    if isinstance(optimizer, Distributed):
        raise ValueError("this optimizer is distributed already: wrap a plain one")
    if op not in (Average, Sum):
        raise ValueError(f"DistributedOptimizer takes op=hvd.Average or hvd.Sum, not {op!r}")
    if gradient_predivide_factor <= 0 or (op != Average and gradient_predivide_factor != 1):
        raise ValueError("gradient_predivide_factor is above 0, and for op=hvd.Average")
    check_integer("backward_passes_per_step", backward_passes_per_step)
    distributed: Any = optimizer
    base = type(optimizer)
    distributed.__class__ = type(base.__name__, (Distributed, base), {})
    distributed.names = {parameter: name for name, parameter in named_parameters or ()}
    distributed.compression = compression
    distributed.passes = backward_passes_per_step
    distributed.op = op
    distributed.factor = gradient_predivide_factor
    distributed.num_passes = Counter()
    distributed.under_way = {}
    distributed.hooked = set()
    distributed.hook_parameters()
    # A hook, not a method: a scheduler made before has wrapped the plain ``step``. It comes first.
    hook = distributed.register_step_pre_hook(Distributed.before_step)
    distributed._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)
    return distributed
