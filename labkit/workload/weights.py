"""Parameters to start from, and layers that are not trained."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from labkit.units import closest
from labkit.workload.weight_files import read_weights

# All layers but the last, unless the model has a part of this name.
FEATURES = "features"
# Parts of names that torch.compile, FSDP and activation checkpointing put into them.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# BatchNorm did not count its batches before 2018, and load_state_dict makes up for that.
_COUNTER = "num_batches_tracked"
# labkit's models whose layers are torchvision's, in the same order.
_IN_TORCHVISION = {
    "resnet18": "resnet18",
    "resnet50": "resnet50",
    "mobilenet": "mobilenet_v2",
    "vgg16": "vgg16",
}


def load_weights(model: nn.Module, path: str | Path, name: str | None = None) -> str:
    """Let ``model`` start from the parameters and buffers in a file or folder.

    It may have any layout that ``read_weights`` knows, and names with what wrappers put before or
    into them (``module.``, ``model.``, ``_orig_mod.``). Of tied parameters one is enough. ``name``
    is that of one of labkit's models, into which torchvision's parameters fit as well, or those
    for another number of classes or kind of image: then the last layer, or the first one, stays
    as it was made.

    Returns, as a sentence, what stays or was left out.

    Raises:
        ValueError: names or shapes do not fit; the message lists some.
    """
    given = read_weights(path)
    expected = model.state_dict()
    match = _match_names(given, _tied_groups(expected), path)
    if match is None and name in _IN_TORCHVISION:
        match = _match_torchvision(given, expected, name, path)
    if match is None:
        match = _Match(given, "", [])
    tensors = match.tensors
    stays = [] if name is None else _ends_of_other_shape(model, tensors)
    for key in stays:
        tensors.pop(key, None)
    try:
        misfits = model.load_state_dict(tensors, strict=False)
        if misfits.unexpected_keys or set(misfits.missing_keys) - set(stays):
            raise RuntimeError(misfits)
    except RuntimeError as error:
        raise ValueError(
            f"{path} does not fit the model {name or type(model).__name__}: give parameters of "
            f"the same model, for images of the same kind. {textwrap.shorten(str(error), 400)}"
        ) from None
    notes = []
    if stays:
        notes.append(
            f"not in this shape in {Path(path).name}, so as initialized: {', '.join(stays)}"
        )
    if match.left_out:
        notes.append(
            f"{len(match.left_out)} tensors of {Path(path).name} are not under "
            f"{match.prefix!r} and were left out, the first {match.left_out[0]}"
        )
    return "; ".join(notes)


class _Match(NamedTuple):
    """The tensors of a file for a model, by the model's names, which follow ``prefix`` there."""

    tensors: dict[str, Tensor]
    prefix: str
    left_out: list[str]


def _plain(name: str) -> str:
    """Return a name without the parts that wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _tied_groups(state: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor in a state dict: several where parameters are tied."""
    groups: dict[object, list[str]] = {}
    for name, tensor in state.items():
        memory: object = name
        if tensor.numel():
            memory = tensor.data_ptr(), tensor.shape, tensor.stride()
        groups.setdefault(memory, []).append(name)
    return list(groups.values())


def _match_names(
    given: dict[str, Tensor], groups: Sequence[Sequence[str]], path: str | Path
) -> _Match | None:
    """Find in the file the tensors of all ``groups`` of names, perhaps all after one prefix.

    None where some group has nothing. ValueError where several prefixes have all of them.
    """
    in_file = {_plain(name): name for name in given}
    needed = [group for group in groups if not group[0].endswith(_COUNTER)]
    if not needed:
        return None
    prefixes = {""}
    for ending in map(_plain, needed[0]):
        prefixes |= {n.removesuffix(ending) for n in in_file if n.endswith(f".{ending}")}
    matches = []
    for prefix in sorted(prefixes):
        tensors = {}
        for group in groups:
            in_both = [name for name in group if prefix + _plain(name) in in_file]
            if in_both:
                value = given[in_file[prefix + _plain(in_both[0])]]
                tensors |= dict.fromkeys(group, value)
        if all(group[0] in tensors for group in needed):
            taken = {prefix + _plain(name) for name in tensors}
            left_out = []
            for plain, name in in_file.items():
                if not plain.startswith(prefix):
                    left_out.append(name)
                elif plain not in taken:
                    # Of the same part, and not the model's: load_state_dict refuses it.
                    tensors[name] = given[name]
            matches.append(_Match(tensors, prefix, left_out))
    if len(matches) > 1 and matches[0].prefix:
        listed = " and ".join(repr(match.prefix) for match in matches)
        raise ValueError(
            f"{path} has the model's parameters several times, under {listed}: save those to "
            "start from in a separate file"
        )
    return matches[0] if matches else None


def _match_torchvision(
    given: dict[str, Tensor], expected: dict[str, Tensor], name: str, path: str | Path
) -> _Match | None:
    """Find the tensors of labkit's model in a file of torchvision's, by the order of layers."""
    from torchvision import models

    with torch.device("meta"):
        original_names = list(getattr(models, _IN_TORCHVISION[name])().state_dict())
    names = list(expected)
    if name == "vgg16":
        # Its classifier has 120 million parameters; labkit's has one layer.
        original_names = [key for key in original_names if key.startswith("features.")]
        names = names[: len(original_names)]
    match = _match_names(given, [[key] for key in original_names], path)
    if match is None:
        return None
    renamed = dict(zip(original_names, names, strict=True))
    tensors = {renamed.get(key, key): value for key, value in match.tensors.items()}
    if name == "vgg16":
        tensors = {key: value for key, value in tensors.items() if key in expected}
    return _Match(tensors, match.prefix, match.left_out)


def _ends_of_other_shape(model: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """Return the names in the first and the last layer, where the file has no such shapes."""
    expected = model.state_dict()
    layers = [key for key, layer in model.named_children() if layer.state_dict()]
    names = []
    for layer in dict.fromkeys((layers[0], layers[-1])):
        keys = [k for k in expected if k.startswith(f"{layer}.") and not k.endswith(_COUNTER)]
        if any(key not in tensors or tensors[key].shape != expected[key].shape for key in keys):
            names += keys
    return names


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
            parameters = list(dict(model.named_parameters()))
            last = parameters[-1].rpartition(".")[0]
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
