"""The hardware of this machine, and which device and backend each rank gets."""

import os
import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from labkit.config import parse_devices
from labkit.gpus import num_gpus, nvidia_smi
from labkit.units import MOST_RANKS, check_choice, check_integer, format_count

DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "shared", "gloo")
# The notes that this process has printed.
_printed: set[str] = set()


@dataclass(frozen=True)
class Plan:
    """Where the ranks of one machine run.

    Attributes:
        backend: ``gloo`` or ``nccl``.
        devices: the device of each local rank, for example ``("cuda:0", "cuda:1")``.
        transport: ``shared`` (memory) or ``torch`` (the backend's own point-to-point).
        note: what the learner has to know of the choice, in a sentence; often empty.
    """

    backend: str
    devices: tuple[str, ...]
    transport: str = "torch"
    note: str = ""


def num_cores() -> int:
    """The number of cores this process may use; a container may have fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def plan(
    local_world_size: int,
    device: str = "auto",
    transport: str = "auto",
    gpus: int | None = None,
    devices: str | Sequence[str] | None = None,
) -> Plan:
    """Choose backend, devices and transport for the ranks of this machine.

    NCCL takes one rank per GPU. Ranks that share a GPU, or of which some are on the CPU, talk over
    gloo, with tensors staged through host memory.

    Args:
        local_world_size: the number of ranks on this machine.
        device: one of ``DEVICES``.
        transport: one of ``TRANSPORTS``.
        gpus: the number of GPUs to plan for; None takes those that this machine can use.
        devices: the device of each rank, in rank order, see ``config.parse_devices``; those left
            over are not used. None: the usable GPUs in turn, or the CPU, as ``device`` says.

    Raises:
        ValueError: an unknown ``device`` or ``transport``, or one that this machine lacks; fewer
            ``devices`` than ranks, or others than ``device`` says.
    """
    check_choice("transport", transport, TRANSPORTS)
    if isinstance(device, str) and device.startswith("cuda:"):
        raise ValueError(
            f"unknown device {device!r}: it is the kind, one of {', '.join(DEVICES)}. Single GPUs "
            f"are named in devices, one for each rank, as in devices={device!r}"
        )
    check_choice("device", device, DEVICES)
    if devices is not None:
        chosen = check_named(devices, device, gpus)
        if len(chosen) < local_world_size:
            raise ValueError(
                f"devices {','.join(chosen)!r}: {format_count(len(chosen), 'device')} for "
                f"{format_count(local_world_size, 'rank')}: name one per rank (ranks may share "
                "one: name it twice), or leave devices out"
            )
        chosen = chosen[:local_world_size]
    else:
        count = 0 if device == "cpu" else num_gpus() if gpus is None else gpus
        if device == "cuda" and not count:
            raise ValueError(
                "device 'cuda' was asked for, but this machine shows no CUDA GPU: use device "
                "'cpu' (every page of the course runs on it) or 'auto'"
            )
        chosen = tuple(
            f"cuda:{rank % count}" if count else "cpu" for rank in range(local_world_size)
        )
    kinds = {name.partition(":")[0] for name in chosen}
    # On other systems a semaphore cannot be placed in shared memory.
    can_share = kinds == {"cpu"} and sys.platform.startswith("linux")
    if transport == "shared" and not can_share:
        raise ValueError(
            "transport 'shared' is for ranks that are all on the CPU, on Linux: use 'gloo', on "
            "which everything runs, or 'auto'"
        )
    if kinds == {"cpu"}:
        return Plan("gloo", chosen, "shared" if can_share and transport != "gloo" else "torch")
    if len(kinds) > 1:
        return Plan(
            "gloo",
            chosen,
            note="ranks on the CPU and on GPUs talk over gloo through host memory, and round in "
            "different ways: their results may differ in the last digits",
        )
    if len(set(chosen)) == len(chosen):
        return Plan("gloo" if transport == "gloo" else "nccl", chosen)
    return Plan(
        "gloo",
        chosen,
        note=f"{len(chosen)} ranks share {format_count(len(set(chosen)), 'GPU')}: they talk over "
        "gloo through host memory, since NCCL takes one rank per GPU; times are not those of "
        "more GPUs",
    )


def print_once(note: str) -> None:
    """Print the note of a ``Plan`` to stderr, once per process."""
    if note and note not in _printed:
        _printed.add(note)
        print(note, file=sys.stderr)


def check_named(
    devices: str | Sequence[str], device: str = "auto", gpus: int | None = None
) -> tuple[str, ...]:
    """The names in ``devices``, if this machine has all of them and they are what ``device`` says.

    Args:
        devices: see ``config.parse_devices``.
        device: one of ``DEVICES``.
        gpus: see ``plan``.

    Raises:
        ValueError: a name of another form, of another kind than ``device``, or of a GPU that this
            machine does not have.
    """
    names = parse_devices(devices)
    shown = f"devices {','.join(names)!r}"
    if any(device not in ("auto", name.partition(":")[0]) for name in names):
        raise ValueError(f"{shown} contradict device {device!r}: leave out one of the two")
    if set(names) <= {"cpu"}:
        return names
    count = num_gpus() if gpus is None else gpus
    if not set(names) <= {"cpu", *(f"cuda:{index}" for index in range(count))}:
        raise ValueError(
            f"{shown}: this machine has {format_count(count, 'CUDA GPU')}, counted from cuda:0; "
            "name others, or leave devices out (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
        )
    return names


def check_world_size(world_size: int, *, warn: bool = True) -> None:
    """Refuse an impossible world size; warn if it is too large for this machine.

    Raises:
        ValueError: not an integer from 1 to ``MOST_RANKS``.
    """
    check_integer("world_size", world_size, most=MOST_RANKS)
    cores = num_cores()
    if warn and world_size > 4 * cores:
        warnings.warn(
            f"world_size {world_size} is far above this machine's "
            f"{format_count(cores, 'core')}: the ranks take turns, and each needs about 0.3 GB of "
            "memory",
            stacklevel=_level_of_caller(),
        )


def _level_of_caller() -> int:
    """The ``stacklevel`` with which a warning names the first line outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "labkit":
        frame, level = frame.f_back, level + 1
    return level


def hardware() -> dict[str, Any]:
    """The machine's hardware and system, to be recorded with results measured on it.

    It raises no error, and never initialises CUDA in this process.
    """
    return {
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "memory_gb": round(_memory_bytes() / 1e9, 1),
        "gpus": _gpu_names(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """The versions of Python, torch, numpy and labkit, to be recorded with results."""
    import numpy
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "labkit": version("labkit"),
    }


def _gpu_names() -> list[str]:
    count = num_gpus()
    printed = nvidia_smi("--query-gpu=name", "--format=csv,noheader") if count else ""
    names = [line.strip() for line in printed.splitlines() if line.strip()]
    return names[:count] if len(names) >= count else [f"cuda:{index}" for index in range(count)]


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
            return next(names, platform.processor() or platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
