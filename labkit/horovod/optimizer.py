"""An optimizer that sums gradients over all ranks while backward still runs, as Horovod does it.

1. A hook on each parameter counts its backward passes. 2. After the last of a step it submits the
gradient under the parameter's name; the background thread reduces it while backward goes on.
3. ``step`` submits what no hook has, waits for all results, and updates as the optimizer alone
would. Ranks may finish gradients in different orders, and a rank may have none for a parameter:
it contributes zeros. If no rank has one there is none after step 3, as on one device.

Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow"
(2018), section 4.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import labkit.horovod.operations as hvd
from labkit.units import check_integer


class WrongOrder(ValueError, AssertionError):
    """Calls in an order in which wrong gradients would be reduced (Horovod: AssertionError)."""


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = hvd.Compression.none,
    backward_passes_per_step: int = 1,
    op: str = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
) -> Optimizer:
    """``optimizer``, whose ``step`` uses gradients that were reduced while backward still ran.

    Args:
        named_parameters: names by which the ranks agree; by default their order counts.
        compression: ``Compression.none`` or ``Compression.fp16``, see there.
        backward_passes_per_step: after how many passes a gradient is reduced; they add up.
        op: Average or Sum.
        gradient_predivide_factor: divides before an average, and multiplies after it.
        num_groups, groups: no effect, as what is ready at the same time is fused anyway.
        sparse_as_dense: whether sparse gradients become dense.

    Returns:
        An optimizer of a subclass of the class of ``optimizer``, with its groups and its state.

    Raises:
        ValueError: not an optimizer, a compression or a reduction of gradients; the names are not
            one for each parameter; the passes are not a positive integer.
    """
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"op={op!r}: gradients are reduced by hvd.Average or hvd.Sum")
    if gradient_predivide_factor != 1.0 and (op != hvd.Average or gradient_predivide_factor <= 0):
        raise ValueError(
            "gradient_predivide_factor is above 0 and for op=hvd.Average: leave it out"
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"{optimizer!r:.60} is not an optimizer of torch.optim")
    if not hasattr(compression, "compress"):
        raise ValueError(f"compression is hvd.Compression.none or .fp16, not {compression!r}")
    check_integer("backward_passes_per_step", backward_passes_per_step)
    kind = type(type(optimizer).__name__, (Distributed, type(optimizer)), {})
    wrapped: Distributed = object.__new__(kind)
    # A scheduler puts its own ``step`` into the instance.
    wrapped.__dict__ |= {name: v for name, v in vars(optimizer).items() if name != "step"}
    wrapped._names = _names_of(optimizer.param_groups, named_parameters)
    wrapped._reduction = op, 1 / gradient_predivide_factor, gradient_predivide_factor
    wrapped._compression, wrapped._sparse_as_dense = compression, sparse_as_dense
    wrapped._passes, wrapped._left, wrapped._under_way = backward_passes_per_step, {}, {}
    wrapped._watch()
    return wrapped


class Distributed(Optimizer):
    """What the subclass adds to an optimizer."""

    _names: dict[Tensor, str]
    _reduction: tuple[str, float, float]
    _compression: Any
    _sparse_as_dense: bool
    _passes: int
    # By parameter: the passes before its gradient is submitted, and what was submitted.
    _left: dict[Tensor, int]
    _under_way: dict[Tensor, tuple[Any, Any]]
    _is_synchronized, _synchronizes = False, True

    def _watch(self) -> None:
        """Hook the parameters that need gradients and have no hook yet."""
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self._left:
                    self._names.setdefault(parameter, f"noname.{number}.{place}")
                    self._left[parameter] = self._passes
                    parameter.register_post_accumulate_grad_hook(self._passed)

    def _passed(self, parameter: Tensor) -> None:
        if self._left[parameter] == 0:
            raise WrongOrder(
                f"the gradient of {self._names[parameter]!r} was computed more than "
                f"backward_passes_per_step={self._passes} times before step() or synchronize(): "
                "set it to the number of backward passes in a step"
            )
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._submit(parameter)

    def _submit(self, parameter: Tensor) -> None:
        name, gradient = self._names[parameter], parameter.grad
        op, *scales = self._reduction
        if gradient is not None and gradient.is_sparse:
            if not self._sparse_as_dense:
                self._under_way[parameter] = hvd.sparse_allreduce_async(gradient, name, op), None
                return
            parameter.grad = gradient = gradient.to_dense()
        has_value = gradient is not None
        values = parameter.detach() if gradient is None else gradient
        small, context = self._compression.compress(values)
        handle = hvd.allreduce_async(
            small, None, name, op, *scales, has_value=has_value, in_place=has_value
        )
        self._under_way[parameter] = handle, context

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for example to clip them."""
        self._watch()
        try:
            for parameter in self._left:
                if parameter not in self._under_way:
                    self._submit(parameter)
            for parameter, (handle, context) in self._under_way.items():
                reduced = handle.wait()
                if reduced is None:
                    continue
                if not reduced.is_sparse:
                    reduced = self._compression.decompress(reduced, context)
                if parameter.grad is None or reduced.is_sparse:
                    parameter.grad = reduced
                elif parameter.grad is not reduced:
                    parameter.grad.detach().copy_(reduced)
        finally:
            self._under_way.clear()
            self._left = dict.fromkeys(self._left, self._passes)
        self._is_synchronized = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients after this number of passes, from the next step on."""
        check_integer("backward_passes_per_step", passes)
        self._passes, self._left = passes, dict.fromkeys(self._left, passes)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context for ``step`` after ``synchronize``, which is not to reduce once more."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the reduced gradients and update; gradients of a closure are reduced in it."""
        if not self._synchronizes:
            self._is_synchronized = False
            return super().step(closure)
        if self._is_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after "
                "synchronize(): it reduces the gradients once more, which takes time",
                stacklevel=3,
            )

        def reduced() -> Any:
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            self.synchronize()
            return loss

        if closure is None:
            self.synchronize()
            result = super().step()
        else:
            result = super().step(reduced)
        self._is_synchronized = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        if any(left != self._passes for left in self._left.values()):
            raise WrongOrder(
                "zero_grad() between backward() and step() or synchronize() would clear gradients "
                "that are to be reduced: call it after step()"
            )
        super().zero_grad(set_to_none)


def _names_of(
    groups: list[dict[str, Any]], named: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """The name of each parameter, the same on all ranks."""
    if named is None:
        return {}
    named = list(named)
    if any(not (isinstance(one, tuple) and len(one) == 2) for one in named):
        raise ValueError(
            "named_parameters are pairs of a name and a parameter: use model.named_parameters()"
        )
    names = [name for name, _ in named]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"named_parameters name several parameters {', '.join(doubled)}: ranks agree by name, "
            "so give each another one"
        )
    found = {parameter: name for name, parameter in named}
    missing = sum(p not in found for group in groups for p in group["params"])
    if missing:
        raise ValueError(
            f"named_parameters leave out {missing} of the optimizer's parameters: use "
            "model.named_parameters() of the whole model, or leave named_parameters out"
        )
    return found
