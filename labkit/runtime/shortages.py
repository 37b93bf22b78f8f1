"""What a rank says when memory has run out: the machine's, its own limit, /dev/shm.

Python, PyTorch, NumPy and the system each say a part of it: here are what was asked for, what
there is, and the next step.
"""

import contextlib
import errno
import re
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from labkit import units
from labkit.comm.processes import is_running

SHM = Path("/dev/shm")
_LIMITS = ((resource.RLIMIT_AS, "address space", "-v"), (resource.RLIMIT_DATA, "data", "-d"))
_END_PATIENCE_S = 0.5
_LESS = "Next step: a smaller batch or model, or fewer ranks, since each needs as much"
# How PyTorch's allocator speaks; a DataLoader passes its workers' errors on as text.
_OF_MEMORY = ("can't allocate memory", "not enough memory")
# How PyTorch speaks of its files in /dev/shm, and of a worker that died of writing there.
_OF_SHM = ("shared memory", "(shm)", "</torch_")


def explained(error: BaseException, text: str) -> str:
    """In a rank: ``text`` of an error, and what it does not say if something has run out."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        # Without the stack in C++.
        return text.partition("\nException raised from ")[0].strip()
    if _is_of_shared_memory(error, text):
        return (
            f"{text.strip()}\n{_needed(error)}{_shm_there()}. Next step: a DataLoader with "
            "num_workers=0 needs none of it, fewer workers or smaller batches need less; in a "
            "container it grows with docker run --shm-size=1g, elsewhere with (as root) mount -o "
            "remount,size=1g /dev/shm"
        )
    runs_out = isinstance(error, RuntimeError) and any(words in text for words in _OF_MEMORY)
    runs_out |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    if runs_out or isinstance(error, MemoryError):
        asked = text.strip().rstrip(".") or "asked for more memory than there is"
        return f"{asked}; {_held()}" + ("" if "Next step" in text else f". {_LESS}")
    return text


def hint_of(signal_name: str) -> str:
    """Why the system may have killed a rank by this signal; empty if that is not known."""
    if signal_name == "SIGKILL":
        return " (the system does that when memory runs out)"
    if signal_name == "SIGBUS":
        return f" (the system does that when shared memory runs out; {_shm_there()})"
    return ""


def result_too_large(size_bytes: int) -> str:
    """What to say of a result of this size for which there is no memory, and the next step."""
    return (
        f"there is no memory to pass on a result of {units.format_bytes(size_bytes)}, which for a "
        "moment needs three times as much. Next step: return what you need of it (x.sum(), "
        "x[:10]), or let the rank save it: torch.save(x, path)"
    )


def num_bytes(value: Any) -> int:
    """About how much memory the tensors, arrays, bytes and numbers in ``value`` take."""
    return sum(getattr(leaf, "nbytes", None) or sys.getsizeof(leaf) for leaf in tree_leaves(value))


def _held() -> str:
    """What this process has held at most, and the limits on it."""
    unit = 1 if sys.platform == "darwin" else 1024
    held = units.format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    limits = [
        f", its limit is {units.format_bytes(limit)} of {what} (ulimit {option})"
        for kind, what, option in _LIMITS
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    return f"the rank held up to {held}{''.join(limits)}"


def _is_of_shared_memory(error: BaseException, text: str) -> bool:
    if isinstance(error, OSError):
        # The semaphores of a queue are files there, and the error names none of them.
        frames = traceback.extract_tb(error.__traceback__)
        is_there = bool(frames) and Path(frames[-1].filename).parent.name == "multiprocessing"
        return is_there and error.errno in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT)
    return isinstance(error, RuntimeError) and any(words in text for words in _OF_SHM)


def _shm_there() -> str:
    if not SHM.is_dir():
        return f"{SHM} is missing"
    size = shutil.disk_usage(SHM)
    free, total = units.format_bytes(size.free), units.format_bytes(size.total)
    return f"{SHM} has {free} of {total} free"


def _needed(error: BaseException) -> str:
    """What the DataLoader whose iteration failed keeps in shared memory, if that can be told."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if not type(owner).__module__.startswith("torch.utils.data"):
            continue
        with contextlib.suppress(Exception):
            # A loader, or what iterates over it.
            of = {name.lstrip("_"): value for name, value in vars(owner).items()}
            size = getattr(of.get("batch_sampler") or of["index_sampler"], "batch_size", 1)
            held = of["num_workers"] * (of["prefetch_factor"] or 2)
            needed = units.format_bytes(held * size * num_bytes(of["dataset"][0]))
            return (
                f"The DataLoader's {units.format_count(of['num_workers'], 'worker')} keep up to "
                f"{held} batches of {size} in shared memory, {needed} on each rank; "
            )
    return ""


def remove_empty_segments() -> None:
    """Remove the empty files that PyTorch leaves in /dev/shm where it could not allocate there.

    Only those whose makers have ended; a worker that was killed may take a moment to.
    """
    until_s = time.monotonic() + _END_PATIENCE_S
    for path in SHM.glob("torch_*"):
        made_by = re.fullmatch(r"torch_(\d+)_\d+_\d+", path.name)
        with contextlib.suppress(OSError):
            if made_by and not path.stat().st_blocks:
                while is_running(int(made_by[1])) and time.monotonic() < until_s:
                    time.sleep(0.01)
                if not is_running(int(made_by[1])):
                    path.unlink()
