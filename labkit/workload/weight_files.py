"""Parameters out of a file or a folder, in the layouts that training programs write.

    weights.safetensors, model.pt, checkpoint.ckpt     a state dict, perhaps nested in a checkpoint
    folder/model.safetensors.index.json                its shards beside it (also .bin)
    folder/rank0.safetensors, ...                      labkit's own checkpoint

Reading executes nothing: ``torch.load`` reads pickles with ``weights_only``. (That of a
distributed checkpoint has a pickle in full, so PyTorch's own converter has to read it.)
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from labkit.engine.files import check_regular

# Where checkpoints keep the model's state dict, in any order of nesting.
_NESTED_UNDER = ("state_dict", "model_state_dict", "model", "module")
# Before each name in labkit's own checkpoints, which have the optimizer's tensors as well.
_OWN_PREFIX = "model/"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors in a file or folder, by name, onto the CPU.

    Raises:
        ValueError: it cannot be read, or is laid out in another way; the message says which.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    return _only_tensors(_read_file(path), path)


def _read_file(path: Path) -> Any:
    check_regular(path)
    try:
        with open(path, "rb") as file:
            head = file.read(9)
        # In safetensors, JSON follows its length, in 8 bytes.
        if head[8:] == b"{":
            return load_file(path)
        return torch.load(path, "cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"weights: there is no file {path}") from None
    # Damaged files raise errors of many kinds, those of zip and pickle among them.
    except Exception as error:
        raise ValueError(
            f"weights: {path} cannot be read: {_reason(error)}. Give safetensors, or "
            "model.state_dict() as torch.save writes it"
        ) from None


def _reason(error: Exception) -> str:
    first_sentence = str(error).partition(". ")[0]
    return " ".join(first_sentence.split()) or type(error).__name__


def _only_tensors(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the state dict in ``content``, which may be nested in a checkpoint."""
    if isinstance(content, dict) and content:
        if all(isinstance(value, Tensor) for value in content.values()):
            return content
        nested = [name for name in _NESTED_UNDER if isinstance(content.get(name), dict)]
        if len(nested) == 1:
            return _only_tensors(content[nested[0]], path)
        if len(nested) > 1:
            raise ValueError(
                f"weights: {path} holds {len(nested)} state dicts, {' and '.join(nested)}: save "
                "the one to start from in a separate file"
            )
    if isinstance(content, dict):
        held = f"holds {', '.join(map(str, list(content)[:8])) or 'nothing'}"
    else:
        held = f"holds one object of type {type(content).__name__}"
    raise ValueError(
        f"weights: {path} {held}, and not tensors by name, there or under "
        f"{', '.join(_NESTED_UNDER)}: save the model's state_dict()"
    )


def _read_folder(folder: Path) -> dict[str, Tensor]:
    if (folder / ".metadata").exists():
        raise ValueError(
            f"weights: {folder} is a distributed checkpoint of PyTorch's: make one file of it by "
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE"
        )
    indexes = sorted(folder.glob("*.index.json"))
    if len(indexes) == 1:
        return _read_shards(folder, _shards_in(indexes[0]))
    checkpoint = sorted(folder.glob("rank*.safetensors"))
    if checkpoint:
        model = {}
        for name, tensor in _read_shards(folder, [file.name for file in checkpoint]).items():
            if name.startswith(_OWN_PREFIX):
                model[name.removeprefix(_OWN_PREFIX)] = tensor
        return model
    names = sorted(file.name for file in folder.iterdir())
    raise ValueError(
        f"weights: the folder {folder} holds {', '.join(names[:6]) or 'nothing'}, and not one "
        "index of shards (*.index.json). Give one of its files, or write its parameters into one "
        "(DeepSpeed: zero_to_fp32.py does)"
    )


def _shards_in(index: Path) -> list[str]:
    """Return the names of the files that an index lists; they have to lie beside it."""
    check_regular(index)
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if not all(Path(shard).name == shard for shard in shards):
            raise ValueError("it names files in other folders")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"weights: {index} is not an index of shards, with a weight_map from names to files: "
            f"{_reason(error)}"
        ) from None
    return shards


def _read_shards(folder: Path, shards: Sequence[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= _only_tensors(_read_file(folder / shard), folder / shard)
    return tensors
