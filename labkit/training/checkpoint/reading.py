"""Reading the tensors of a checkpoint: any of them, on any number of ranks, without a group.

``.metadata`` is a pickle, and a pickle can run any code, so PyTorch's reader would run a hostile
one. Here it may name only the classes that describe tensors and their places, and even for these
it gets empty stand-ins. What it says is checked, too: a place is one of the checkpoint's own
files, and a tensor has as many bytes there.

Source: "Restricting Globals" in the documentation of Python's ``pickle``.
"""

import io
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.training.checkpoint.folder import METADATA
from labkit.training.checkpoint.whole import NotWholeError, read_record, why_not_whole

_DCP = "torch.distributed.checkpoint"
# What stands in the descriptions of PyTorch 2.11 and later.
_DESCRIBING = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _StandIn:
    """An object of the file: what it was made with, and what was set in it."""

    def __init__(self, *values: Any):
        self.values = values
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Descriptions(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _DESCRIBING:
            # A new class each time: a file could set attributes of it.
            return type(name, (_StandIn,), {})
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: its path in the nested dict, and where its bytes are."""

    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int


def read_tensors(path: str | Path, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """Read tensors of one checkpoint into host memory; any process may, and no group is needed.

    Each tensor is read into memory of its own, so a rank needs only what its own tensors take.

    Args:
        path: of the checkpoint.
        keys: each a name, such as "model.fc.weight", or what comes before a dot in names, such as
            "model" or "ranks.0", for all tensors below; None for all.

    Returns:
        Nested dicts, as they were given to ``CheckpointWriter.save``.

    Raises:
        ValueError: a key that it does not have, or it is not whole (by names and sizes of its
            files; ``newest`` also compares what is in them).
    """
    path = Path(path)
    if why := why_not_whole(path, contents=False):
        raise ValueError(f"cannot read the checkpoint {path}: {why}")
    try:
        chosen = _chosen(stored_in(path), None if keys is None else list(keys), path)
        nested: dict[str, Any] = {}
        for one in sorted(chosen, key=lambda one: (one.file, one.offset)):
            branch = nested
            for key in one.path[:-1]:
                branch = branch.setdefault(key, {})
            branch[one.path[-1]] = _read(path, one)
    except NotWholeError as error:
        raise ValueError(f"cannot read the checkpoint {path}: {error}") from error
    return nested


def stored_in(path: Path) -> list[Stored]:
    """All tensors of a checkpoint, from its ``.metadata``.

    Raises:
        NotWholeError: it is damaged, or not the description of tensors that labkit writes.
    """
    data = (path / METADATA).read_bytes()
    sizes = {name: told["bytes"] for name, told in read_record(path)["files"].items()}
    try:
        whole = _Descriptions(io.BytesIO(data)).load().state
        names, places = whole["state_dict_metadata"], whole["storage_data"]
        at = {_field(index, "fqn"): place.state for index, place in places.items()}
        return [_stored(name, one.state, at[name], whole, sizes) for name, one in names.items()]
    except NotWholeError:
        raise
    # A damaged pickle can raise anything.
    except Exception as error:
        raise NotWholeError(f"{METADATA} is damaged or foreign: {error}") from error


def _field(thing: _StandIn, name: str) -> Any:
    return thing.state[name]


def _stored(
    name: str,
    told: dict[str, Any],
    at: dict[str, Any],
    whole: dict[str, Any],
    sizes: dict[str, int],
) -> Stored:
    dtype = told["properties"].state[0]
    shape = _numbers(told["size"])
    parts = tuple(whole["planner_data"][name])
    file, offset, num_bytes = at["relative_path"], at["offset"], at["length"]
    if not all(isinstance(part, str) for part in (*parts, file)) or not parts:
        raise NotWholeError(f"{METADATA} names what labkit never writes, for {name}")
    if len(told["chunks"]) != 1 or "transform_descriptors" in at:
        raise NotWholeError(f"{name} is divided or encoded, which labkit never does")
    if not 0 <= offset <= offset + num_bytes <= sizes.get(file, -1):
        raise NotWholeError(f"{METADATA} places {name} outside of the checkpoint's files")
    if not isinstance(dtype, torch.dtype) or math.prod(shape) * dtype.itemsize > num_bytes:
        raise NotWholeError(f"{METADATA} gives {name} more elements than are stored")
    return Stored(parts, dtype, shape, file, offset, num_bytes)


def _numbers(size: _StandIn) -> tuple[int, ...]:
    numbers = tuple(size.values[0])
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise NotWholeError(f"{METADATA} has a shape {numbers}")
    return numbers


def _chosen(stored: list[Stored], keys: list[str] | None, path: Path) -> list[Stored]:
    if keys is None:
        return stored
    below: dict[str, list[Stored]] = {}
    for one in stored:
        for depth in range(1, len(one.path) + 1):
            below.setdefault(".".join(one.path[:depth]), []).append(one)
    if missing := [key for key in keys if key not in below]:
        raise ValueError(
            f"the checkpoint {path} has no {', '.join(map(repr, missing[:5]))}; it has "
            f"{', '.join(sorted({one.path[0] for one in stored})) or 'no tensors'}"
        )
    return list({one.path: one for key in keys for one in below[key]}.values())


def _read(path: Path, one: Stored) -> Tensor:
    name = ".".join(one.path)
    try:
        with open(path / one.file, "rb", buffering=0) as file:
            part: Any = _Slice(file, one.offset, one.num_bytes)
            tensor = torch.load(part, map_location="cpu", weights_only=True)
    # As with every damaged pickle.
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotWholeError(f"{one.file} is damaged, at {name}: {said}") from error
    if not isinstance(tensor, Tensor) or (tensor.dtype, tensor.shape) != (one.dtype, one.shape):
        raise NotWholeError(f"{one.file} holds something else than {METADATA} says, at {name}")
    return tensor


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.RawIOBase, start: int, num_bytes: int):
        self._file, self._start, self._num_bytes, self._at = file, start, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._num_bytes - self._at)
        view = memoryview(buffer).cast("B")[:left]
        self._file.seek(self._start + self._at)
        got = self._file.readinto(view) or 0
        self._at += got
        return got
