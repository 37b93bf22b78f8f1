"""Parameters out of a file or a folder, in the layouts that training programs write.

    weights.safetensors, model.pt, checkpoint.ckpt     a state dict, perhaps nested in a checkpoint
    folder/model.safetensors.index.json                its shards beside it (also .bin)
    folder/.metadata, folder/__0_0.distcp              torch.distributed.checkpoint's
    folder/rank0.safetensors, ...                      labkit's own checkpoint

Reading executes nothing: ``torch.load`` reads pickles with ``weights_only``, and the one that
``torch.distributed.checkpoint`` would read in full is left to ``_MetadataUnpickler``.
"""

import json
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from labkit.files import check_regular

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
                "the one to start from in a file of its own"
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
        return _read_distributed_checkpoint(folder)
    indexes = sorted(folder.glob("*.index.json"))
    if len(indexes) == 1:
        return _read_shards(folder, _shards_in(indexes[0]))
    own = sorted(folder.glob("rank*.safetensors"))
    if own:
        tensors = _read_shards(folder, [file.name for file in own])
        names = [name for name in tensors if name.startswith(_OWN_PREFIX)]
        return {name.removeprefix(_OWN_PREFIX): tensors[name] for name in names}
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return read_weights(files[0])
    names = sorted(file.name for file in folder.iterdir())
    raise ValueError(
        f"weights: the folder {folder} holds {', '.join(names[:6]) or 'nothing'}: no .metadata of "
        "torch.distributed.checkpoint, and not one index of shards (*.index.json). Give one of "
        "its files, or write its parameters into one (DeepSpeed: zero_to_fp32.py does)"
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


_METADATA = "Metadata MetadataIndex StorageMeta TensorProperties _MEM_FORMAT_ENCODING"
_ENTRIES = "TensorStorageMetadata ChunkStorageMetadata BytesStorageMetadata"
# Module -> what the metadata of a distributed checkpoint is made of.
_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": (*_METADATA.split(), *_ENTRIES.split()),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "WindowsPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """A reader of that metadata alone: any other class is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":
            # Python 3.13 names the module that defines them. No other version has it.
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _OF_METADATA.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint's metadata")


def _read_distributed_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a folder that ``torch.distributed.checkpoint.save`` has written."""
    # Not at the top: few runs need it, and it takes a second to import.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(folder / ".metadata", "rb") as file:
                return _MetadataUnpickler(file).load()

    try:
        metadata = Reader(folder).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            # It warns that it reads in one process, which is what is wanted here.
            warnings.simplefilter("ignore")
            dcp.load(tensors, storage_reader=Reader(folder), no_dist=True)
    except Exception as error:
        raise ValueError(
            f"weights: the distributed checkpoint in {folder} cannot be read: {_reason(error)}"
        ) from None
    # Its names are paths through the dict that was saved: "model.0.weight", "optim.state.0...".
    return tensors
