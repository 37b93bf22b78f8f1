"""Whether a checkpoint is whole, and which is the newest that is: read only, nothing is changed.

``labkit.json`` is written last. It has the size and the SHA-256 of every other file, and its own,
so that files that are missing, cut short or changed are found, each with what differs.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from labkit.training.checkpoint.folder import FACTS, METADATA, steps

FORMAT = 1
_CHUNK_BYTES = 1 << 20
# A file of facts is some kilobytes; what is longer by far is not one.
_MOST_FACTS_BYTES = 1 << 28


class Found(NamedTuple):
    """What ``newest`` has found: a path or None, and what is wrong with each newer one."""

    path: Path | None
    skipped: list[str]


class NotWholeError(ValueError):
    """A checkpoint is damaged, or was not written by this version of labkit."""


def plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the facts, as they will be read.

    Raises:
        ValueError: JSON cannot hold them.
    """
    try:
        return json.loads(json.dumps(dict(facts)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"facts of a checkpoint must be what JSON can hold: {error}") from None


def dumped(step: int, facts: dict[str, Any], files: dict[str, dict[str, Any]]) -> bytes:
    """The content of ``labkit.json``.

    Args:
        step: updates so far.
        facts: what JSON can hold.
        files: by name, their ``bytes`` and ``sha256``.
    """
    told = {"labkit_checkpoint": FORMAT, "step": step, "facts": facts, "files": files}
    # As it will be read: its own SHA-256 must not depend on how keys were typed.
    record = json.loads(json.dumps(told))
    return json.dumps(record | {"sha256": _digest(record)}, indent=1).encode()


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_facts(path: str | Path) -> dict[str, Any]:
    """The facts with which the checkpoint at ``path`` was saved.

    As JSON keeps them: tuples have become lists, and keys texts. Only ``labkit.json`` is read; see
    ``why_not_whole`` for the other files.

    Raises:
        ValueError: it is no checkpoint of labkit's, or its facts are damaged.
    """
    try:
        return read_record(Path(path))["facts"]
    except NotWholeError as error:
        raise ValueError(f"cannot read the checkpoint {path}: {error}") from None


def read_record(path: Path) -> dict[str, Any]:
    """``labkit.json``: ``step``, ``facts``, ``files``.

    Raises:
        NotWholeError: it is missing, damaged, or of another format.
    """
    file = path / FACTS
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise NotWholeError(f"{FACTS} is not a file")
        if file.stat().st_size > _MOST_FACTS_BYTES:
            raise NotWholeError(f"{FACTS} is too long to be one of labkit's")
        record = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise NotWholeError(
            f"no {FACTS}: it is incomplete, or was not written by labkit"
        ) from None
    except OSError as error:
        raise NotWholeError(f"{FACTS} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        if file.stat().st_size == 0:
            raise NotWholeError(f"{FACTS} is empty") from None
        raise NotWholeError(f"{FACTS} is damaged: it is not JSON") from None
    return _checked(record)


def _checked(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict) or "labkit_checkpoint" not in record:
        raise NotWholeError(f"{FACTS} was not written by labkit")
    if record["labkit_checkpoint"] != FORMAT:
        raise NotWholeError(
            f"it has format {record['labkit_checkpoint']!r}, and this version of labkit reads "
            f"format {FORMAT}"
        )
    if record.pop("sha256", None) != _digest(record):
        raise NotWholeError(f"{FACTS} is damaged: its SHA-256 differs")
    return record


def why_not_whole(path: str | Path, *, contents: bool = True) -> str:
    """What is wrong with the checkpoint at ``path``; empty if it is whole.

    Args:
        path: of one checkpoint.
        contents: whether to read all of it and compare the SHA-256 of each file; otherwise only
            names and sizes are compared.
    """
    path = Path(path)
    try:
        files = read_record(path)["files"]
        _check_sizes(path, files)
        for name, told in files.items():
            if contents and file_digest(path / name) != told["sha256"]:
                raise NotWholeError(
                    f"{name} has been changed or damaged: its SHA-256 is not the one that was "
                    "written"
                )
    except NotWholeError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return ""


def _check_sizes(path: Path, files: dict[str, dict[str, Any]]) -> None:
    if METADATA not in files:
        raise NotWholeError(f"{FACTS} does not name {METADATA}")
    if missing := sorted(files.keys() - set(os.listdir(path))):
        raise NotWholeError(f"files are missing: {', '.join(missing)}")
    for name, told in files.items():
        found = (path / name).lstat()
        if not stat.S_ISREG(found.st_mode):
            raise NotWholeError(f"{name} is not a file")
        if found.st_size != told["bytes"]:
            raise NotWholeError(
                f"{name} has {found.st_size} bytes, and {told['bytes']} were written"
            )


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in parts."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


def newest(folder: str | Path, below: int | None = None) -> Found:
    """The newest whole checkpoint in a folder, and what is wrong with every newer one.

    Reads all bytes of those that it looks at, and changes nothing.

    Args:
        folder: of the checkpoints.
        below: look only at those of fewer updates.

    Returns:
        The path, or None if no checkpoint is whole; and for each newer one, newest first, a
        sentence such as "step-00000140: __1_0.distcp has 100 bytes, and 2304 were written".

    Raises:
        ValueError: the folder cannot be read.
    """
    skipped = []
    try:
        found = steps(folder)
    except OSError as error:
        raise ValueError(f"cannot read checkpoints in {folder}: {error.strerror}") from None
    for step, path in found:
        if below is not None and step >= below:
            continue
        if not (why := why_not_taken(path)):
            return Found(path, skipped)
        skipped.append(f"{path.name}: {why}")
    return Found(None, skipped)


def why_not_taken(path: Path) -> str:
    """Why this is not a whole checkpoint of a run; empty if it is one.

    Stricter than ``why_not_whole``: another user may have put it there, or a link to another one.
    """
    try:
        found, owner = path.lstat(), path.parent.stat().st_uid
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if stat.S_ISLNK(found.st_mode):
        return "it is a link, and runs make folders"
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if found.st_uid not in (os.geteuid(), 0, owner):
        return f"it belongs to user {found.st_uid}, and the folder around it does not"
    return why_not_whole(path)
