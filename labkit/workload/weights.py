"""Parameters to start from, out of a file, and layers that are not trained."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from labkit.files import check_regular
from labkit.units import closest

# All layers but the last, unless the model has a part of this name.
FEATURES = "features"


def load_weights(model: nn.Module, path: str | Path, name: str | None = None) -> str:
    """Let ``model`` start from the parameters and buffers in a file.

    It is safetensors, or a file of ``torch.save``, of which only tensors are read. ``name`` is
    that of one of labkit's models, into which torchvision's parameters (.pth) fit as well, or
    those for another number of classes or kind of image: then the last layer, or the first one,
    stays as it was made. What stays is returned as a sentence.
    """
    given, stays = read_weights(path), list[str]()
    # DistributedDataParallel puts this before each name.
    consume_prefix_in_state_dict_if_present(given, "module.")
    if name is not None:
        given, stays = _in_order(model, given, name)
    try:
        found = model.load_state_dict(given, strict=False)
        if found.unexpected_keys or set(found.missing_keys) - set(stays):
            raise RuntimeError(found)
    except RuntimeError as error:
        raise ValueError(
            f"{path} does not fit the model {name or type(model).__name__}: give parameters of "
            f"the same model, for images of the same kind. {textwrap.shorten(str(error), 400)}"
        ) from None
    if not stays:
        return ""
    return f"not in this shape in {Path(path).name}, so as initialised: {', '.join(stays)}"


def _in_order(
    model: nn.Module, given: dict[str, Tensor], name: str
) -> tuple[dict[str, Tensor], list[str]]:
    """``given`` under the model's names, but a first or last layer of another shape; and that."""
    # labkit's models are flat lists of torchvision's layers: names differ, and not the order.
    wanted = model.state_dict()
    if given.keys() != wanted.keys():
        # VGG16's own classifier is larger; before 2018, BatchNorm did not count its batches.
        left_out = ("classifier." if name == "vgg16" else "\0", "num_batches_tracked")
        names, theirs = (
            [key for key in state if not any(word in key for word in left_out)]
            for state in (wanted, given)
        )
        if len(theirs) > len(names):
            return given, []
        given = {mine: given[key] for mine, key in zip(names, theirs)}
        wanted = {key: wanted[key] for key in names}
    layers = [key for key, layer in model.named_children() if layer.state_dict()]
    stays = []
    for layer in (layers[0], layers[-1]):
        keys = [key for key in wanted if key.startswith(f"{layer}.")]
        if any(key not in given or given[key].shape != wanted[key].shape for key in keys):
            stays += keys
    return {key: value for key, value in given.items() if key not in stays}, stays


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors in a file, by their names, on the CPU; nothing in it is executed."""
    check_regular(path)
    try:
        with open(path, "rb") as file:
            head = file.read(9)
        # In safetensors, JSON follows its length, in 8 bytes.
        is_safetensors = head[8:] == b"{"
        found: Any = (
            load_file(path) if is_safetensors else torch.load(path, "cpu", weights_only=True)
        )
    except FileNotFoundError:
        raise ValueError(f"weights: there is no file {path}") from None
    # Damaged files raise errors of many kinds, those of zip and pickle among them.
    except Exception as error:
        why = " ".join(str(error).partition(". ")[0].split()) or type(error).__name__
        raise ValueError(
            f"weights: {path} cannot be read: {why}. Give safetensors, or model.state_dict() as "
            "torch.save writes it"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ValueError(
            f"weights: {path} holds other than tensors by name: save its state_dict()"
        )
    return found


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Take parameters of ``model`` out of training.

    ``names`` are those of modules or parameters, with all that is in them; ``features`` is all but
    the last layer that has parameters. The BatchNorm of a frozen layer stays in evaluation mode:
    in training mode it would still adapt to the batches.
    """
    known = [name for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    frozen: list[str] = []
    for name in names:
        if name == FEATURES and name not in known:
            parameters = (key for key, _ in model.named_parameters())
            last = [key.rpartition(".")[0] for key in parameters][-1]
            frozen += [k for k in known if not _is_in(k, [last]) and not _is_in(last, [k])]
        elif name in known:
            frozen.append(name)
        else:
            hint = closest(name, [FEATURES, *known])
            raise ValueError(f"freeze: the model has no layer {name!r}{hint}")
    for key, parameter in model.named_parameters():
        if _is_in(key, frozen):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"freeze {','.join(names)} leaves no parameter to train")
    for key, module in model.named_modules():
        if _is_in(key, frozen) and isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(_evaluate)


def _evaluate(module: nn.Module, inputs: Any) -> None:
    # A hook, since every technique calls train() on the whole model.
    module.training = False


def _is_in(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
