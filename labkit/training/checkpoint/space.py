"""Whether a checkpoint fits on its disk, and how it is said that it could not be written."""

import errno
import os
from pathlib import Path

from labkit.training.checkpoint.plan import Plan
from labkit.units import format_bytes

# What a tensor takes in its file beside its elements, about.
_OVERHEAD_BYTES = 2048
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_space(folder: Path, plan: Plan) -> None:
    """Raise OSError if there is less space than the checkpoint needs: before it is used up."""
    free = _free_bytes(folder)
    if free is not None and free < _needed_bytes(plan):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def explained(error: Exception, path: Path, plan: Plan) -> str:
    """Why the checkpoint at ``path`` could not be written; its bytes, if space is the cause."""
    if not isinstance(error, OSError):
        return f"cannot write {path}: {type(error).__name__}: {error}"
    text = f"cannot write {path}: {error.strerror or error}"
    if error.errno in _FULL:
        free = _free_bytes(path.parent)
        there = "" if free is None else f", and {format_bytes(free)} are free there"
        text += f". It needs about {format_bytes(_needed_bytes(plan))}{there}"
    return text + ". The checkpoints before it are as they were"


def _needed_bytes(plan: Plan) -> int:
    return plan.num_bytes + _OVERHEAD_BYTES * len(plan.metadata.state_dict_metadata)


def _free_bytes(folder: Path) -> int | None:
    """Bytes that this user can still write there; None where the file system does not say."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None
