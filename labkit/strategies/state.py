"""What a rank gives to a checkpoint, and takes from one: tensors, named by what they are.

    model/NAME            a parameter or buffer, as the model's state dict names it
    optimizer/NAME/KEY    what the optimizer has of a parameter
    buffers/NAME          a buffer of which each rank has its own values
    own/NAME              what else this rank alone carries from step to step

The first two have the model's names and shapes, whichever rank holds them. So a run may go on with
another number of ranks, or with another technique.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
# Python's numbers among an optimizer's state travel as tensors, by names that begin so.
_NUMBER = "number:"


class Held(NamedTuple):
    """What one rank has of the model, by the model's names: the run's own tensors."""

    tensors: State
    buffers: State
    parameters: Mapping[str, Tensor]


def held_by(model: nn.Module) -> Held:
    """What a rank with the whole model has; a tied parameter is one parameter."""
    tensors = {k: v.detach() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    return Held(tensors, dict(model.named_buffers()), dict(model.named_parameters()))


def named(kind: str, tensors: Mapping[str, Tensor]) -> State:
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


def of_kind(kind: str, state: Mapping[str, Tensor]) -> State:
    """The reverse of ``named``."""
    prefix = f"{kind}/"
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


@torch.no_grad()
def copy_into(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def state_of_parameter(optimizer: torch.optim.Optimizer, parameter: Tensor) -> State:
    """What the optimizer has of one parameter, by KEY: tensors and numbers."""
    found = State()
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, bool | int | float):
            kind = torch.float64 if isinstance(value, float) else None
            found[_NUMBER + key] = torch.tensor(value, dtype=kind)
        elif isinstance(value, Tensor):
            found[key] = value
        elif value is not None:
            raise ValueError(
                f"the optimizer keeps {key} as a {type(value).__name__}, and a checkpoint holds "
                "tensors and numbers: use another optimizer, or leave checkpoint_dir out"
            )
    return found


def load_state_of_parameter(
    optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Tensor]
) -> None:
    # PyTorch's optimizers count steps on the host, but for those that run as one kernel.
    on_host = not (optimizer.defaults.get("capturable") or optimizer.defaults.get("fused"))
    for key, value in state.items():
        if key.startswith(_NUMBER):
            optimizer.state[parameter][key.removeprefix(_NUMBER)] = value.item()
        else:
            device = "cpu" if on_host and key == "step" else parameter.device
            optimizer.state[parameter][key] = value.to(device, copy=True)


def cut(flat: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> State:
    """What an optimizer has of one flat parameter [N], as NAME/KEY of the trained parameters."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    found, sizes = State(), [p.numel() for p in trained.values()]
    for key, value in flat.items():
        parts = value.split(sizes) if value.dim() else [value] * len(sizes)
        for (name, parameter), part in zip(trained.items(), parts):
            found[f"{name}/{key}"] = part.view(parameter.shape) if value.dim() else part
    return found


def joined(state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> State:
    """The reverse of ``cut``."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    flat = State()
    for key in dict.fromkeys(name.rpartition("/")[2] for name in state):
        parts = [state[f"{name}/{key}"] for name in trained]
        # Of a parameter without dimensions, too, the rest has its shape.
        is_number = key == "step" or key.startswith(_NUMBER)
        is_number |= any(part.shape != p.shape for part, p in zip(parts, trained.values()))
        flat[key] = parts[0] if is_number else torch.cat([part.flatten() for part in parts])
    return flat
