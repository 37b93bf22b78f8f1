"""A model's tensors: what a rank gives to a checkpoint and takes from one, and flat tensors.

A checkpoint's tensors are named by what they are:

    model/NAME            a parameter or buffer, as the model's state dict names it
    optimizer/NAME/KEY    what the optimizer has of a parameter
    own/NAME              what else this rank alone carries from step to step

The first two have the model's names and shapes, whichever rank holds them. So a run may go on with
another number of ranks, or with another technique.

A flat tensor [N] of all parameters can be cut anywhere, into chunks of equal size, and one message
can carry all of it. A list of tensors cannot be cut evenly, and each of many small messages has a
latency.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


def named(kind: str, tensors: Mapping[str, Tensor]) -> State:
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


def of_kind(kind: str, state: Mapping[str, Tensor]) -> State:
    """The reverse of ``named``."""
    prefix = f"{kind}/"
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def optimizer_state(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> State:
    """What the optimizer has of one parameter, by KEY."""
    found = optimizer.state.get(parameter, {}) if optimizer else {}
    for key, value in found.items():
        if not isinstance(value, Tensor | None):
            raise ValueError(
                f"the optimizer keeps {key} as a {type(value).__name__}, and a checkpoint holds "
                "tensors: use another optimizer, or leave checkpoint_dir out"
            )
    return {key: value for key, value in found.items() if value is not None}


def load_optimizer(optimizer: torch.optim.Optimizer, parameter: Tensor, state: State) -> None:
    for key, value in state.items():
        # PyTorch's optimizers count steps on the host.
        device = parameter.device if value.dim() else "cpu"
        optimizer.state[parameter][key] = value.to(device, copy=True)


def cut(flat: State, parameters: Mapping[str, Tensor]) -> State:
    """What an optimizer has of one flat parameter [N], as NAME/KEY of the trained parameters."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    found, sizes = State(), [p.numel() for p in trained.values()]
    for key, value in flat.items():
        # A number, such as a count of steps, is the same for all of them.
        parts = value.split(sizes) if value.dim() else [value] * len(sizes)
        for (name, parameter), part in zip(trained.items(), parts):
            found[f"{name}/{key}"] = part.view(parameter.shape) if value.dim() else part
    return found


def joined(state: State, parameters: Mapping[str, Tensor]) -> State:
    """The reverse of ``cut``."""
    trained, flat = {name: p for name, p in parameters.items() if p.requires_grad}, State()
    for key in dict.fromkeys(name.rpartition("/")[2] for name in state):
        parts = [state[f"{name}/{key}"] for name in trained]
        is_number = any(part.shape != p.shape for part, p in zip(parts, trained.values()))
        flat[key] = parts[0] if is_number else torch.cat([part.flatten() for part in parts])
    return flat


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that require a gradient; a tied one comes once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def lay_end_to_end(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Move a model's trained parameters into one flat tensor, and make them views of it.

    Returns:
        (values [N], gradients [N]); the gradients are zeros. The parameters' ``grad`` are views of
        ``gradients``, to which backward adds. Reset it with ``gradients.zero_()``: an optimizer's
        ``zero_grad`` would remove the views.
    """
    trained = trained_parameters(model)
    values = torch.cat([p.detach().flatten() for p in trained])
    gradients = torch.zeros_like(values)
    sizes = [p.numel() for p in trained]
    for parameter, value, gradient in zip(trained, values.split(sizes), gradients.split(sizes)):
        parameter.data = value.view_as(parameter)
        parameter.grad = gradient.view_as(parameter)
    return values, gradients


def flat_buffers(model: nn.Module) -> Tensor:
    """A model's buffers end to end, [B], in its parameters' dtype (a counter up to 2^24 is exact).

    The tensor is empty if the model has none.
    """
    like = next(model.parameters())
    return torch.cat([like.new_empty(0), *(b.flatten().to(like) for b in model.buffers())])


@torch.no_grad()
def load_flat_buffers(model: nn.Module, flat: Tensor) -> None:
    """Set a model's buffers to those that ``flat_buffers`` of an equal one returned."""
    buffers = list(model.buffers())
    for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers])):
        buffer.copy_(values.view_as(buffer))
