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

from labkit.collectives.handle import Handle
from labkit.strategies.by_name.operations import SparseHandle
from labkit.units import check_integer

# Submits an all-reduce: name, tensor (a sparse one, too), options of ``Request``. The result is
# the reduced tensor, or None if no rank has a value.
Begin = Callable[..., Handle | SparseHandle]


class WrongOrder(ValueError, AssertionError):
    """Calls in an order in which wrong gradients would be reduced (Horovod: AssertionError)."""


def distributed(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None,
    begin: Begin,
    compression: Any,
    passes: int,
    sparse_as_dense: bool,
) -> Optimizer:
    """An optimizer of a subclass of the class of ``optimizer``, with its groups and its state.

    Args:
        begin: submits a gradient.
        compression: has ``compress(tensor)``, which returns what travels and a context, and
            ``decompress(tensor, context)``.
        passes: backward passes before each step.
        sparse_as_dense: whether sparse gradients become dense ones.

    Raises:
        ValueError: not an optimizer or a compression; the names are not one for each parameter;
            ``passes`` is not a positive integer.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"{optimizer!r:.60} is not an optimizer of torch.optim")
    if not hasattr(compression, "compress"):
        raise ValueError(f"compression is hvd.Compression.none or .fp16, not {compression!r}")
    check_integer("backward_passes_per_step", passes)
    names = _names_of(optimizer.param_groups, named_parameters)
    kind = type(type(optimizer).__name__, (Distributed, type(optimizer)), {})
    wrapped: Distributed = object.__new__(kind)
    # A scheduler puts its own ``step`` into the instance.
    wrapped.__dict__ |= {name: v for name, v in vars(optimizer).items() if name != "step"}
    wrapped.gradients = Gradients(names, begin, compression, passes, sparse_as_dense)
    wrapped.gradients.watch(wrapped.param_groups)
    return wrapped


class Gradients:
    """The gradients of one optimizer on their way: steps 1 to 3."""

    def __init__(
        self,
        names: dict[Tensor, str],
        begin: Begin,
        compression: Any,
        passes: int,
        sparse_as_dense: bool,
    ):
        self._names, self._begin, self._compression = names, begin, compression
        self._passes, self._sparse_as_dense = passes, sparse_as_dense
        # The passes that are left before this parameter's gradient is submitted.
        self._left: dict[Tensor, int] = {}
        self._under_way: dict[Tensor, tuple[Handle | SparseHandle, Any]] = {}

    def set_passes(self, passes: int) -> None:
        check_integer("backward_passes_per_step", passes)
        self._passes = passes
        self._left = dict.fromkeys(self._left, passes)

    def watch(self, groups: list[dict[str, Any]]) -> None:
        """Hook the parameters that need gradients and have no hook yet."""
        for number, group in enumerate(groups):
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
        if gradient is not None and gradient.is_sparse:
            if not self._sparse_as_dense:
                self._under_way[parameter] = self._begin(name, gradient), None
                return
            parameter.grad = gradient = gradient.to_dense()
        has_value = gradient is not None
        values = parameter.detach() if gradient is None else gradient
        small, context = self._compression.compress(values)
        handle = self._begin(name, small, has_value=has_value, in_place=has_value)
        self._under_way[parameter] = handle, context

    def have_begun(self) -> bool:
        """Whether a backward pass has run since the last step."""
        return any(left != self._passes for left in self._left.values())

    def finish(self) -> None:
        """Submit the gradients that are left, and wait until all are reduced."""
        try:
            for parameter in self._left:
                if parameter not in self._under_way:
                    self._submit(parameter)
            for parameter, (handle, context) in self._under_way.items():
                reduced = handle.wait()
                if reduced is None:
                    continue
                if reduced.is_sparse:
                    parameter.grad = reduced
                    continue
                reduced = self._compression.decompress(reduced, context)
                if parameter.grad is None:
                    parameter.grad = reduced
                elif parameter.grad is not reduced:
                    parameter.grad.detach().copy_(reduced)
        finally:
            self._under_way.clear()
            self._left = dict.fromkeys(self._left, self._passes)


class Distributed(Optimizer):
    """What the subclass adds to an optimizer."""

    gradients: Gradients
    _is_synchronized, _synchronizes = False, True

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for example to clip them."""
        self.gradients.watch(self.param_groups)
        self.gradients.finish()
        self._is_synchronized = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients after this number of passes, from the next step on."""
        self.gradients.set_passes(passes)

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
        if closure is None:
            self.synchronize()
            self._is_synchronized = False
            return super().step()

        def reduced() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            return loss

        result = super().step(reduced)
        self._is_synchronized = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.gradients.have_begun():
            raise WrongOrder(
                "zero_grad() between backward() and step() or synchronize() would clear gradients "
                "that are to be reduced: call it after step()"
            )
        super().zero_grad(set_to_none)


def _names_of(
    groups: list[dict[str, Any]], named: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """The name of each parameter, the same on all ranks.

    Raises:
        ValueError: what is given does not name each parameter once.
    """
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
