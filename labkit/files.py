"""Writing outputs: a file completely or not at all, a pipe or a device in place.

A crash, an interrupt or a full disk never leaves half a file, and a pipe or a device is never
replaced by a file.
"""

import contextlib
import errno
import os
import secrets
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from labkit.errors import OutputError


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a new file and rename it, so that a failure leaves the old file as it was.

    For a link, its target is replaced; the new file has the old one's mode and owner. A pipe, a
    character device, and the file that stdout or stderr goes to are written in place.

    Raises:
        ValueError: ``check_writable`` refuses the path.
        OutputError: the writing failed; the message names the path.
    """
    check_writable(path)
    data = content if isinstance(content, bytes) else content.encode()
    old = _find(path)
    try:
        if (descriptor := _stream(old)) is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            _write_to(os.dup(descriptor), data)
        elif old is not None and not stat.S_ISREG(old.st_mode):
            _write_to(_open_for_writing(path), data)
        else:
            _replace(Path(os.path.realpath(path)), data, old)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def check_writable(path: str | Path) -> None:
    """Refuse a path that cannot be written, before hours of training and not after.

    Raises:
        ValueError: no folder to hold it, no permission, or neither a file, a pipe nor a character
            device.
    """
    folder = Path(os.path.realpath(path)).parent
    try:
        old = _find(path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
    is_folder = str(path).endswith(os.sep) or (old is not None and stat.S_ISDIR(old.st_mode))
    if not str(path) or is_folder or not (old or folder.is_dir()):
        raise ValueError(
            f"cannot write {str(path) or repr('')}: give a file in a folder that exists"
        )
    if _stream(old) is not None:
        return
    if old and not any(kind(old.st_mode) for kind in (stat.S_ISREG, stat.S_ISFIFO, stat.S_ISCHR)):
        raise ValueError(
            f"cannot write {path}: it is neither a file, a pipe nor a character device"
        )
    if old and not os.access(path, os.W_OK):
        raise ValueError(f"cannot write {path}: no permission to change it")
    # The new file is written beside the old one and renamed: that needs the folder's permission.
    if (old is None or stat.S_ISREG(old.st_mode)) and not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write {path}: no permission to write to {folder}")


def check_outputs(outputs: Mapping[str, str | None], inputs: Mapping[str, str | None]) -> None:
    """Refuse outputs that cannot be written, or would overwrite each other or an input.

    Args:
        outputs, inputs: paths by option; None if the option was not given.

    Raises:
        ValueError: the message names the options.
    """
    named = [
        (option, path) for option, path in (*outputs.items(), *inputs.items()) if path is not None
    ]
    for option, path in named:
        if option in outputs:
            check_writable(path)
    for (option, path), (other, same) in combinations(named, 2):
        if option in outputs and is_same_file(path, same):
            raise ValueError(
                f"{option} {path} and {other} {same} are the same file: give two files"
            )


def is_same_file(path: str | Path, other: str | Path) -> bool:
    """Whether two paths lead to the same file, which may not exist yet.

    Links are followed. Names that differ only in case, or in the Unicode form of a letter, count
    as the same, as they do on some file systems.
    """
    if os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other):
        return True
    return _alike(path) == _alike(other)


def write_each(*writes: Callable[[], object]) -> None:
    """Call every function of ``writes``, even if another one fails.

    Raises:
        OutputError: one or more have failed; the message names all of them.
    """
    failures = []
    for write in writes:
        try:
            write()
        except OutputError as error:
            failures.append(str(error))
    if failures:
        raise OutputError("; ".join(failures))


def write_private(path: str | Path, parts: Iterable[Any]) -> None:
    """Replace ``path`` itself, even if it is a link, by a file that only this user can use.

    Args:
        path: in a folder that exists, which others may be able to write to.
        parts: bytes, or objects with a buffer, one after another.

    Raises:
        OSError: the writing failed.
    """
    beside = Path(path).with_name(f".labkit-{secrets.token_hex(8)}.part")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(beside, flags, 0o600), "wb") as file:
            file.writelines(parts)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _find(path: str | Path) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path)
    return None


def _stream(found: os.stat_result | None) -> int | None:
    """1 or 2 if stdout or stderr goes to this file, whose printed text must not be lost."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if found and os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    return None


def _open_for_writing(path: str | Path) -> int:
    try:
        # Without O_NONBLOCK, opening a pipe that nobody reads would wait forever.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "nobody reads from it") from None
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _write_to(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(data)


def _replace(path: Path, data: bytes, old: os.stat_result | None) -> None:
    # An unpredictable name, and "x": in a shared folder another user could have put a link there.
    beside = path.with_name(f".labkit-{secrets.token_hex(8)}.part")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            if old is not None:
                _keep_owner_and_mode(file.fileno(), old)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _keep_owner_and_mode(descriptor: int, old: os.stat_result) -> None:
    # Only root may give a file away.
    with contextlib.suppress(PermissionError):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _alike(path: str | Path) -> tuple[str, str]:
    folder, name = os.path.split(os.path.realpath(path))
    return folder, unicodedata.normalize("NFC", name).casefold()
