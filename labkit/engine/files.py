"""Files: written beside and renamed, so that a failure leaves the old one; regular files only."""

import os
import secrets
from pathlib import Path

from labkit.engine.errors import OutputError


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file completely, or raise OutputError; where a link was, a file takes its place."""
    check_writable(path)
    # An unpredictable name, and "x": in a shared folder another user could have put a link.
    beside = Path(path).with_name(f".labkit-{secrets.token_hex(8)}.part")
    if isinstance(content, str):
        content = content.encode()
    try:
        with open(beside, "xb") as file:
            file.write(content)
        os.replace(beside, path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)


def user_folder() -> Path:
    """The user's folder of labkit: in ``XDG_DATA_HOME``, or else in ``~/.local/share``."""
    folder = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(folder):  # the XDG specification ignores relative ones
        folder = os.path.expanduser("~/.local/share")
    return Path(folder, "labkit")


def check_folder(name: str, path: str | Path) -> None:
    """ValueError, before hours of training, if no file could be written to a folder to be made."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"{name} {path}: {folder} is no folder")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{name} {path}: no permission to write to {folder}")


def check_regular(path: str | Path) -> None:
    """ValueError for a folder, a pipe or a device: to open a pipe could wait forever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"cannot read {path}: it is not a regular file")


def check_writable(*paths: str | Path | None) -> None:
    """ValueError, before hours of training, for what cannot be written, or twice the same."""
    given = [path for path in paths if path is not None]
    for path in given:
        folder = Path(path).parent
        if not Path(path).name or str(path).endswith(os.sep) or not folder.is_dir():
            raise ValueError(f"cannot write {str(path)!r}: give a file in a folder that exists")
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"cannot write {path}: it is not a regular file")
        if not os.access(folder, os.W_OK):
            raise ValueError(f"cannot write {path}: no permission to write to {folder}")
    if len({os.path.realpath(path) for path in given}) < len(given):
        raise ValueError(f"{' and '.join(map(str, given))} are the same file: give two files")
