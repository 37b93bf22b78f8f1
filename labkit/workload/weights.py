"""Parameters from a file: of the same model, or of torchvision's model of the same name.

labkit's models are flat lists of layers, so the names of the same parameters differ from
torchvision's: the layers that have parameters are matched in their order.
"""

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from labkit.files import check_regular
from labkit.workload.models import torchvision_layers

State = dict[str, Tensor]

# Under these names a checkpoint of a training script has the parameters.
_INSIDE = ("model", "state_dict", "model_state_dict")
# Of torchvision's models, what labkit's leave out.
_WITHOUT = {"inception_v3": "AuxLogits.", "vgg16": "classifier."}
# How many differences an error names.
_NAMED = 3


def load_weights(model: nn.Module, path: str | Path, name: str | None = None) -> str:
    """Let ``model`` start from the parameters and buffers in a file.

    Args:
        model: on the CPU; it is changed.
        path: safetensors, or a file of ``torch.save``, of which only tensors are read.
        name: of one of labkit's models, into which torchvision's parameters fit as well, or those
            of the same model for another number of classes or size of image: then the last layer,
            or the first one, stays as it was made.

    Returns:
        What was not loaded, as a sentence; empty if all was.

    Raises:
        ValueError: no such file, none of these formats, or it does not fit; the message names the
            first differences.
    """
    wanted, given = model.state_dict(), read_weights(path)
    # DistributedDataParallel puts this before each name.
    consume_prefix_in_state_dict_if_present(given, "module.")
    left: dict[str, list[str]] = {}
    if name is not None:
        given = _renamed(given, model, name)
        left = _left_out(given, model)
    stays = {key for keys in left.values() for key in keys}
    differences = [
        f"{key} is {list(given[key].shape)} in the file and {list(value.shape)} in the model"
        for key, value in wanted.items()
        if key in given and key not in stays and given[key].shape != value.shape
    ]
    # Before 2018, BatchNorm did not count its batches.
    missing = [key for key in wanted if key not in stays and not key.endswith("batches_tracked")]
    for mine, theirs, where in ((missing, given, "file"), (given, wanted, "model")):
        state = wanted if where == "file" else given
        differences += [
            f"{key} {list(state[key].shape)} is not in the {where}"
            for key in mine
            if key not in theirs
        ]
    if differences:
        more = len(differences) - _NAMED
        told = "; ".join(differences[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"{path} does not fit the model {name or type(model).__name__}: {told}. Give "
            "parameters of the same model, for images of the same kind"
        )
    model.load_state_dict({key: v for key, v in given.items() if key not in stays}, strict=False)
    parts = [
        f"the {what} layer ({keys[0]} {list(wanted[keys[0]].shape)})"
        for what, keys in left.items()
    ]
    here = f"not in this shape in {Path(path).name}: as initialised"
    return f"{' and '.join(parts)} {here}" if parts else ""


def read_weights(path: str | Path) -> State:
    """The tensors in a file, by their names, on the CPU.

    Raises:
        ValueError: no such file, or none that holds tensors by their names.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        # To open a pipe would wait for a writer.
        raise ValueError(f"weights: {path} cannot be read: it is not a plain file")
    check_regular(path)
    try:
        with open(path, "rb") as file:
            head = file.read(9)
        # The length of the JSON that follows, in 8 bytes.
        if head[8:9] == b"{":
            found: Any = load_file(path)
        else:
            with warnings.catch_warnings():
                # That of a file of another pickle protocol, which is read or refused all the same.
                warnings.simplefilter("ignore")
                found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"weights: there is no file {path}") from None
    # Damaged files raise errors of many kinds, those of zip and pickle among them.
    except Exception as error:
        why = " ".join(str(error).split(". ")[0].split()) or type(error).__name__
        if "weights only" in str(error).lower():
            why = "it holds other objects than tensors, which could run code, or it is damaged"
        raise ValueError(
            f"weights: {path} cannot be read: {why}. Give safetensors, or model.state_dict() as "
            "torch.save writes it"
        ) from None
    for key in _INSIDE:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found:
        raise ValueError(f"weights: {path} holds a {type(found).__name__}, not tensors by name")
    for key, value in found.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"weights: {path} holds a {type(value).__name__} under {key!r}, not a tensor: "
                "save model.state_dict()"
            )
    return dict(found)


def _renamed(given: State, model: nn.Module, name: str) -> State:
    """``given`` with the names of ``model``, as far as it has its layers."""
    ours = [key for key, layer in model.named_children() if layer.state_dict()]
    theirs: list[str] = torchvision_layers(name)
    if all(re.match(r"[0-9]+\.", key) for key in given):
        # labkit's own: a model for small images may lack a layer without parameters.
        theirs = sorted({key.split(".")[0] for key in given}, key=int)
    elif not any(key.startswith(f"{layer}.") for layer in theirs for key in given):
        return given
    if len(ours) != len(theirs):
        return given
    mine = dict(zip(theirs, ours))
    longest_first = sorted(filter(None, theirs), key=len, reverse=True)
    renamed = {}
    for key, value in given.items():
        layer = next((layer for layer in longest_first if key.startswith(f"{layer}.")), None)
        if layer is not None:
            key = mine[layer] + key.removeprefix(layer)
        elif key.startswith(_WITHOUT.get(name, "none of them")):
            continue
        renamed[key] = value
    return renamed


def _left_out(given: State, model: nn.Module) -> dict[str, list[str]]:
    """The parameters of the last and of the first layer, if they are made for other data."""
    layers = [(name, layer.state_dict()) for name, layer in model.named_children()]
    layers = [(name, state) for name, state in layers if state]
    found = {}
    for what, (name, state) in (("last", layers[-1]), ("first", layers[0])):
        wanted = {f"{name}.{key}": value for key, value in state.items()}
        pairs = [(given[key], value) for key, value in wanted.items() if key in given]
        other = [pair for pair in pairs if pair[0].shape != pair[1].shape]
        # Other classes are other rows; another stem has other filters, or channels to filter.
        same = slice(1, None) if what == "last" else slice(0, 1)
        fits = all(a.ndim == b.ndim and a.shape[same] == b.shape[same] for a, b in other)
        if (other and fits) or (what == "last" and not pairs):
            found[what] = list(wanted)
    return found
