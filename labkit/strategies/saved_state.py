"""The tensors that a technique gives to a checkpoint, and takes from it.

The names of a checkpoint's tensors: ``model/NAME``, a parameter or buffer as the model's state
dict names it; ``optimizer/NAME/KEY``, the optimizer's state of a parameter, or ``number/NAME/KEY``
if that is no tensor; and ``own/NAME``, anything else that a rank carries from step to step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from labkit.strategies.traits import Division

State = dict[str, Tensor]


class SavedState:
    """The part of a checkpoint that is one rank's, of a ``Strategy`` that has been set up.

    A technique that does not hold the model as it is gives its subclass as ``saved_state_class``.
    """

    def __init__(self, strategy: Any):
        self.strategy = strategy

    def held(self) -> tuple[State, dict[str, nn.Parameter]]:
        """This rank's tensors by the model's names: all of them, and its parameters, each once."""
        model = self.strategy.model
        return model.state_dict(), dict(model.named_parameters())

    def collect(self) -> State:
        """Return this rank's tensors; a collective call."""
        strategy = self.strategy
        tensors, parameters = self.held()
        has_part = bool(strategy.traits.division & (Division.LAYERS | Division.ROWS))
        state = State()
        if has_part or strategy.comm.rank == strategy.workers[0]:
            state |= named("model", tensors)
        if strategy.optimizer and (has_part or strategy.comm.rank == 0):
            for name, parameter in parameters.items():
                for key, value in strategy.optimizer.state.get(parameter, {}).items():
                    stored, tensor = as_tensor(f"{name}/{key}", value)
                    state[stored] = tensor
        return state

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what all ranks collected; no "own" tensors if these were other ranks."""
        tensors, parameters = self.held()
        for name, tensor in tensors.items():
            tensor.copy_(state[f"model/{name}"])
        optimizer = self.strategy.optimizer
        if not optimizer:
            return
        for name, parameter in parameters.items():
            for key, value in of_kind(f"optimizer/{name}", state).items():
                # PyTorch's optimizers count steps on the host.
                device = parameter.device if value.dim() else "cpu"
                optimizer.state[parameter][key] = value.to(device, copy=True)
            for key, value in of_kind(f"number/{name}", state).items():
                optimizer.state[parameter][key] = value.item()

    def rehearse(self, inputs: Tensor, targets: Tensor, batch_size: int) -> None:
        """Prepare for ``restore``: do what a first step leaves behind, beside its update."""


def as_tensor(name: str, value: object) -> tuple[str, Tensor]:
    """Return what a checkpoint holds of an optimizer's value ``PARAMETER/KEY``: (name, tensor).

    ValueError for a value that is neither a tensor nor a number.
    """
    if isinstance(value, Tensor):
        return f"optimizer/{name}", value
    if isinstance(value, int | float):
        dtype = torch.float64 if isinstance(value, float) else None
        return f"number/{name}", torch.tensor(value, dtype=dtype)
    raise ValueError(
        f"the optimizer has a {type(value).__name__} as {name}, and a checkpoint holds tensors "
        "and numbers: use another optimizer, or leave checkpoint_dir out"
    )


def named(kind: str, tensors: Mapping[str, Tensor]) -> State:
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


def of_kind(kind: str, state: Mapping[str, Tensor]) -> State:
    """The reverse of ``named``."""
    prefix = f"{kind}/"
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
