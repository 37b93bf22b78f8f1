"""What a rank says when memory has run out: the machine's, its own limit, a GPU's, /dev/shm.

Python, PyTorch, NumPy and the system each say a part of it: here are what was asked for, what
there is, and the next step.
"""

import contextlib
import errno
import os
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
_END_PATIENCE_S = 0.5
_LIMITS = (
    (resource.RLIMIT_AS, "address space", "VmPeak", "-v"),
    (resource.RLIMIT_DATA, "data", "VmData", "-d"),
)
_LESS = "Next step: a smaller batch or model, or fewer ranks, since each needs as much"
# How PyTorch speaks of its files in /dev/shm, and of a worker that died of writing there.
_SHM_WORDS = ("shared memory", "(shm)", "</torch_")


def explained(error: BaseException, text: str) -> str:
    """In a rank: ``text`` of an error, and what it does not say if something has run out.

    Args:
        error: any error.
        text: its text, perhaps empty.
    """
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return gpu_words(error, text)
    if _is_of_shared_memory(error, text):
        return f"{text.strip()}\n{_shm_words(error)}"
    if _is_of_memory(error, text):
        asked = text.strip().rstrip(".") or "asked for more memory than there is"
        next_step = "" if "Next step" in text else f". {_LESS}"
        return f"{asked}; {memory_words()}{next_step}"
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


def memory_words() -> str:
    """What this process has held at most, and the limits on it."""
    unit = 1 if sys.platform == "darwin" else 1024
    held = units.format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    limits = [
        f", its limit is {units.format_bytes(limit)} of {what}{_of_which(field)} (ulimit {option})"
        for kind, what, field, option in _LIMITS
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    return f"the rank held up to {held}{''.join(limits)}"


def _of_which(field: str) -> str:
    """How much of it this process has, from a field of /proc/self/status, where there is one."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        (value,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    except (OSError, ValueError):
        return ""
    return f", of which it had {units.format_bytes(int(value) * 1024)}"


def _is_of_memory(error: BaseException, text: str) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # The second one is PyTorch's allocator; a DataLoader passes its workers' errors on as text.
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and any(words in text for words in ("can't allocate memory", "not enough memory"))
    )


def _is_of_shared_memory(error: BaseException, text: str) -> bool:
    if isinstance(error, OSError):
        # The semaphores of a queue are files there, and the error names none of them.
        frames = traceback.extract_tb(error.__traceback__)
        return (
            bool(frames)
            and Path(frames[-1].filename).parent.name == "multiprocessing"
            and (error.errno in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT))
        )
    return isinstance(error, RuntimeError) and any(words in text for words in _SHM_WORDS)


def _shm_words(error: BaseException) -> str:
    return (
        f"{_needed(error)}{_shm_there()}. Next step: a DataLoader with num_workers=0 needs none "
        "of it, fewer workers or smaller batches need less; in a container it grows with "
        "docker run --shm-size=1g, elsewhere with (as root) mount -o remount,size=1g /dev/shm"
    )


def remove_empty_segments(made_after_s: float) -> None:
    """Remove the empty files that PyTorch leaves in /dev/shm where it could not allocate there.

    Only those that ended processes of this user have made since then, and nothing lies in.
    """
    until_s = time.monotonic() + _END_PATIENCE_S
    # A process that was killed takes a moment to end.
    while found := _empty_segments(made_after_s):
        for path, pid in found.items():
            if not is_running(pid):
                path.unlink(missing_ok=True)
        if time.monotonic() > until_s or not any(map(is_running, found.values())):
            break
        time.sleep(0.01)


def _empty_segments(made_after_s: float) -> dict[Path, int]:
    """This user's new files of PyTorch in /dev/shm without content, and who made each."""
    found = {}
    for path in SHM.glob("torch_*") if SHM.is_dir() else ():
        name = re.fullmatch(r"torch_(\d+)_\d+_\d+", path.name)
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_ours = status.st_uid == os.getuid() and status.st_ctime >= made_after_s
            if name and is_ours and not status.st_blocks and os.access(SHM, os.W_OK):
                found[path] = int(name[1])
    return found


def _shm_there() -> str:
    try:
        size = shutil.disk_usage(SHM)
    except OSError:
        return f"{SHM} is missing"
    is_read_only = os.statvfs(SHM).f_flag & os.ST_RDONLY
    free, total = units.format_bytes(size.free), units.format_bytes(size.total)
    return f"{SHM} has {free} of {total} free{', and is read-only' if is_read_only else ''}"


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


def num_bytes(value: Any) -> int:
    """About how much memory the tensors, arrays, bytes and numbers in ``value`` take."""
    return sum(getattr(leaf, "nbytes", None) or sys.getsizeof(leaf) for leaf in tree_leaves(value))


def gpu_words(error: BaseException, text: str) -> str:
    """In a rank: the text of a GPU's error without the C++ stack, and the next step.

    Args:
        error: memory that has run out, or an error of CUDA.
        text: its text; PyTorch's names the request and what is free where PyTorch has allocated.
    """
    text = text.partition("\nException raised from ")[0]
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return (
            f"{text.strip()}{_free_words(text)} Next step: a smaller batch or more micro-batches; "
            "ranks on one GPU share its memory, so also fewer of them per GPU."
        )
    text = text.partition("CUDA kernel errors might be")[0].strip()
    return (
        f"{text}. The GPU runs behind the program, so the line may be a later one: "
        'os.environ["CUDA_LAUNCH_BLOCKING"] = "1" before the run shows the line that failed'
    )


def _free_words(text: str) -> str:
    """How much of this rank's GPU is free, unless ``text`` says it or CUDA cannot be asked."""
    if "free" in text:
        return ""
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
    except Exception:
        # After some errors CUDA does not answer any more; there may also be no GPU.
        return ""
    free, total = units.format_bytes(free_bytes), units.format_bytes(total_bytes)
    return f" ({free} of the GPU's {total} are free.)"
