"""Files: written beside and renamed, so that a failure leaves the old one; regular files only."""

import os
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from labkit.errors import OutputError


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file completely or not at all; it keeps the mode of the old one.

    Raises:
        ValueError: ``check_writable`` refuses the path.
        OutputError: the writing failed; the message names the path.
    """
    check_writable(path)
    data = content if isinstance(content, bytes) else content.encode()
    mode = stat.S_IMODE(os.stat(path).st_mode) if os.path.exists(path) else 0o666
    try:
        write_private(os.path.realpath(path), [data], mode)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def write_private(path: str | Path, parts: Iterable[Any], mode: int = 0o600) -> None:
    """Replace ``path`` itself, even if it is a link, by a file that only this user can use.

    Args:
        path: in a folder that exists, which others may be able to write to.
        parts: bytes, or objects with a buffer, one after another.
        mode: of the new file, if others may use it, too.

    Raises:
        OSError: the writing failed.
    """
    # An unpredictable name, and O_EXCL: in a shared folder another user could have put a link.
    beside = Path(path).with_name(f".labkit-{secrets.token_hex(8)}.part")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(beside, flags, mode), "wb") as file:
            file.writelines(parts)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def check_regular(path: str | Path) -> None:
    """Refuse to read what is there, but is no file: to open a pipe could wait for ever.

    Raises:
        ValueError: a folder, a pipe or a device.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"cannot read {path}: it is not a regular file")


def check_writable(path: str | Path) -> None:
    """Refuse a path that cannot be written, before hours of training and not after.

    Raises:
        ValueError: no folder to hold it, no permission, or something else than a file is there.
    """
    folder = Path(os.path.realpath(path)).parent
    if not str(path) or str(path).endswith(os.sep) or os.path.isdir(path) or not folder.is_dir():
        raise ValueError(
            f"cannot write {str(path) or repr('')}: give a file in a folder that exists"
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"cannot write {path}: it is not a regular file")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write {path}: no permission to write to {folder}")


def check_outputs(outputs: Mapping[str, str | None], inputs: Mapping[str, str | None]) -> None:
    """Refuse outputs that cannot be written, or would overwrite each other or an input.

    Args:
        outputs, inputs: paths by option; None if the option was not given.

    Raises:
        ValueError: the message names the options.
    """
    given = [(option, path) for option, path in (*outputs.items(), *inputs.items()) if path]
    for path in outputs.values():
        if path is not None:
            check_writable(path)
    for (option, path), (other, same) in combinations(given, 2):
        if option in outputs and os.path.realpath(path) == os.path.realpath(same):
            raise ValueError(
                f"{option} {path} and {other} {same} are the same file: give two files"
            )


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
