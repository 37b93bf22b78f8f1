"""Layers that are not trained: a frozen backbone, of which only the last layer learns."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from labkit.units import closest

# All layers but the last, unless the model has a part of this name.
FEATURES = "features"


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Take parameters out of training.

    The BatchNorm of a frozen layer stays in evaluation mode: it normalises with the averages that
    it was trained with, and does not change them. In training mode it would still adapt to the
    batches, and its layer would not be frozen. So it also needs nothing from other ranks.

    Args:
        model: it is changed.
        names: of modules or parameters, with all that is in them. ``features`` is all but the last
            layer that has parameters, unless a module has this name.

    Raises:
        ValueError: an unknown name, or nothing is left to train.
    """
    known = [name for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    frozen: list[str] = []
    for name in names:
        if name == FEATURES and name not in known:
            frozen += _all_but_the_last(model)
        elif name in known:
            frozen.append(name)
        else:
            some = ", ".join([FEATURES, *(key for key, _ in model.named_children())][:6])
            raise ValueError(
                f"freeze: the model has no layer {name!r}{closest(name, [FEATURES, *known])}: "
                f"name some of its layers, such as {some}"
            )
    for key, parameter in model.named_parameters():
        if _is_in(key, frozen):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"freeze {','.join(names)} leaves no parameter to train: name fewer layers"
        )
    for key, module in model.named_modules():
        if _is_in(key, frozen) and isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(_evaluate)


def is_frozen(module: nn.Module) -> bool:
    """Whether this is a BatchNorm that ``freeze`` keeps in evaluation mode."""
    return _evaluate in module._forward_pre_hooks.values()


def _evaluate(module: nn.Module, inputs: Any) -> None:
    # A hook, since every technique calls train() on the whole model.
    module.training = False


def _all_but_the_last(model: nn.Module) -> Iterator[str]:
    with_parameters = [
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(False))
    ]
    last = with_parameters[-1]
    # Layers without parameters, too: they may have statistics.
    leaves = [name for name, module in model.named_modules() if not list(module.children())]
    for name in (*leaves, *(name for name, _ in model.named_parameters())):
        if last and not _is_in(name, [last]):
            yield name


def _is_in(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
