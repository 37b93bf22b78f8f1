"""An optimizer that sums gradients over all ranks while backward still runs, as Horovod does it.

1. A hook on each parameter counts its backward passes. 2. After the last of a step it submits the
gradient under the parameter's name; the background thread carries it out while backward goes on.
3. ``step`` submits what no hook has, waits for all results, and then updates as the optimizer
alone would. The negotiation lets ranks finish gradients in different orders, or not have some.

Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow"
(2018), section 4.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Submits a gradient (name, tensor, whether there is one) and returns a function that waits for it:
# its result is the reduced tensor, or None if no rank has a gradient.
Submit = Callable[[str, Tensor, bool], Callable[[], Tensor | None]]


class WrongOrder(ValueError, AssertionError):
    """Calls in an order that would reduce wrong gradients (Horovod: an AssertionError)."""


def distributed(
    optimizer: Optimizer,
    named: list[tuple[str, Tensor]] | None,
    submit: Submit,
    passes: int,
    compression: Any,
    sparse_as_dense: bool,
) -> Optimizer:
    """An optimizer like ``optimizer``, of a subclass of its class, which sums gradients.

    It has the same parameter groups and state. See ``labkit.horovod.DistributedOptimizer``.
    """
    wrapped = object.__new__(type(type(optimizer).__name__, (Distributed, type(optimizer)), {}))
    # A scheduler puts its own ``step`` into the instance.
    kept = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(wrapped).update(kept)
    wrapped.prepare(named, submit, passes, compression)
    wrapped.sparse_as_dense = sparse_as_dense
    return wrapped


class Distributed(Optimizer):
    """The methods that the subclass adds."""

    sparse_as_dense = False

    def prepare(
        self, named: list[tuple[str, Tensor]] | None, submit: Submit, passes: int, compression: Any
    ) -> None:
        self._names = _names_of(self.param_groups, named)
        self._submit, self._passes, self._compression = submit, passes, compression
        self._left: dict[Tensor, int] = {}
        self._under_way: dict[Tensor, tuple[Callable[[], Tensor | None], Any]] = {}
        self._is_synchronized, self._synchronizes = False, True
        self._watch_new()

    def _watch_new(self) -> None:
        """Hook the parameters that need gradients and are not hooked yet."""
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self._left:
                    self._names.setdefault(parameter, f"noname.{number}.{place}")
                    self._left[parameter] = self._passes
                    parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    def _gradient_ready(self, parameter: Tensor) -> None:
        if parameter in self._under_way or self._left[parameter] == 0:
            raise WrongOrder(
                f"the gradient of {self._names[parameter]!r} was computed more often than "
                f"backward_passes_per_step={self._passes} before step() or synchronize(): raise "
                "backward_passes_per_step to the number of backward passes in a step"
            )
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._send(parameter)

    def _send(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            if not self.sparse_as_dense:
                raise ValueError(
                    f"the gradient of {self._names[parameter]!r} is sparse: use "
                    "DistributedOptimizer(..., sparse_as_dense=True)"
                )
            parameter.grad = gradient = gradient.to_dense()
        values = parameter.detach() if gradient is None else gradient
        small, context = self._compression.compress(values)
        name = f"allreduce.{self._names[parameter]}"
        wait = self._submit(name, small, gradient is not None)
        self._under_way[parameter] = wait, context

    def synchronize(self) -> None:
        """Submit the gradients that are left, and wait until all are reduced."""
        self._watch_new()
        try:
            for parameter in self._left:
                if parameter not in self._under_way:
                    self._send(parameter)
            for parameter, (wait, context) in self._under_way.items():
                if (reduced := wait()) is None:
                    continue
                reduced = self._compression.decompress(reduced, context)
                if parameter.grad is None:
                    parameter.grad = reduced
                elif parameter.grad.data_ptr() != reduced.data_ptr():
                    parameter.grad.detach().copy_(reduced)
        finally:
            self._under_way.clear()
            self._left = dict.fromkeys(self._left, self._passes)
        self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which ``step`` does not synchronize, after a call of ``synchronize``."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the reduced gradients and update; those of a closure are reduced in it."""
        if not self._synchronizes:
            self._is_synchronized = False
            return super().step(closure)
        if self._is_synchronized:
            warnings.warn(
                "step() after synchronize() reduces the gradients once more, which takes time: "
                "call step() inside `with optimizer.skip_synchronize():`",
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

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._under_way:
            raise WrongOrder(
                "zero_grad() between backward() and step() or synchronize() would clear gradients "
                "that are being reduced: call it after step()"
            )
        super().zero_grad(*args, **kwargs)


def _names_of(
    groups: list[dict[str, Any]], named: list[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """The name of each parameter, the same on all ranks.

    Raises:
        ValueError: what is given does not name each parameter once.
    """
    if named is None:
        return {}
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
