"""Tensors of bytes in a file that all processes of a machine map into their memory.

So a data set is in memory once, and not once per rank. The file has one line of JSON, padded to a
page, and then the tensors. It is only ever used if nobody but this user could have written it.
"""

import hashlib
import json
import math
import mmap
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.files import write_private

_ENDING = ".labkit"
# Of the file, as the first bytes of its line.
_VERSION = 1
_HEAD_BYTES = 4096
# Each tensor begins at a multiple of this.
_ALIGNED_BYTES = 64
_DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.int64)}

# What reading a damaged line of JSON may raise.
_DAMAGED = ValueError, KeyError, TypeError

Tensors = dict[str, Tensor]


def shared(folder: Path, name: str, make: Callable[[], Tensors]) -> Tensors:
    """What ``make`` makes of the files in ``folder``, in memory that processes share.

    It is kept in the folder, or, if that cannot be written, among the temporary files. It is made
    anew if the files have changed since, or if its own bytes have. If it can be kept nowhere, this
    process has a copy of its own.

    Args:
        folder: of the files that ``make`` reads.
        name: of what is made.
        make: makes tensors of uint8 or int64, by their names.

    Raises:
        The errors of ``make``.
    """
    file_name = f".{name}{_ENDING}"
    key = {"version": _VERSION, "name": name, "sources": _sources(folder)}
    for home in _homes(folder):
        with suppress(OSError, *_DAMAGED):
            return _mapped(home / file_name, key)
    made = make()
    for home in _homes(folder):
        # Another process may have written it meanwhile.
        with suppress(OSError, *_DAMAGED):
            return _mapped(home / file_name, key)
        with suppress(OSError, *_DAMAGED):
            _write(home / file_name, key, made)
            return _mapped(home / file_name, key)
    return made


def _sources(folder: Path) -> list[list[Any]]:
    """Name, size and times of each file in ``folder``, by which a change of it is noticed."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.endswith((_ENDING, ".part")):
            now = path.stat()
            facts = now.st_size, now.st_mtime_ns, now.st_ctime_ns
            found.append([str(path.relative_to(folder)), *facts])
    return found


def _homes(folder: Path) -> Iterator[Path]:
    """Folders for the file: that of the data, and one of this user among the temporary files."""
    yield folder
    mark = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    temporary = Path(tempfile.gettempdir()) / f"labkit-data-{os.getuid()}"
    with suppress(OSError):
        temporary.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(temporary)
        # Another user may have made it, to put files of their own there.
        is_private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
        if is_private and found.st_uid == os.getuid():
            home = temporary / mark
            home.mkdir(mode=0o700, exist_ok=True)
            yield home


def _write(path: Path, key: dict[str, Any], tensors: Tensors) -> None:
    """Raises OSError; several processes may write at once, and the last one's file stays."""
    digest, shapes = hashlib.sha256(), {}
    parts: list[Any] = []
    for name, tensor in tensors.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        padding = bytes(-data.nbytes % _ALIGNED_BYTES)
        shapes[name] = [str(tensor.dtype), list(tensor.shape)]
        parts += [data, padding]
    for part in parts:
        digest.update(part)
    head = json.dumps({"key": key, "shapes": shapes, "sha256": digest.hexdigest()}).encode()
    pages = math.ceil((len(head) + 1) / _HEAD_BYTES)
    write_private(path, [head.ljust(pages * _HEAD_BYTES - 1) + b"\n", *parts])


def _mapped(path: Path, key: dict[str, Any]) -> Tensors:
    """The tensors in the file, if they are those of ``key`` and whole.

    Raises:
        OSError, or one of _DAMAGED: they are not, or another user could have written them.
    """
    with open(
        os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb"
    ) as f:
        found = os.fstat(f.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o022 or found.st_nlink != 1:
            raise ValueError(f"{path} is no file of one user")
        if found.st_uid not in (os.getuid(), 0):
            raise ValueError(f"{path} belongs to user {found.st_uid}")
        line = f.readline(found.st_size)
        head = json.loads(line)
        if head["key"] != key:
            raise ValueError(f"{path} is of other data")
        # By reading: mapped pages would count as this process's memory.
        if hashlib.file_digest(f, "sha256").hexdigest() != head["sha256"]:
            raise ValueError(f"{path} is damaged")
        memory = mmap.mmap(f.fileno(), found.st_size, access=mmap.ACCESS_READ)
    return dict(_views(memory, head["shapes"], len(line)))


def _views(memory: mmap.mmap, shapes: dict[str, Any], start: int) -> Iterator[tuple[str, Tensor]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        for name, (dtype_name, shape) in shapes.items():
            dtype, count = _DTYPES[dtype_name], math.prod(shape)
            values = torch.empty(0, dtype=dtype)
            if count:
                values = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
            yield name, values.view(shape)
            start += math.ceil(values.nbytes / _ALIGNED_BYTES) * _ALIGNED_BYTES
