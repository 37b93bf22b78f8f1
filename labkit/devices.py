"""The hardware of this machine, and which device and backend each rank gets."""

import os
import platform
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from labkit.units import MOST_RANKS, check_choice, check_integer, format_count

DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "shared", "gloo")


@dataclass(frozen=True)
class Plan:
    """Where the ranks of one machine run.

    Attributes:
        backend: ``gloo`` or ``nccl``.
        devices: the device of each local rank, for example ``("cuda:0", "cuda:1")``.
        transport: ``shared`` (memory) or ``torch`` (the backend's own point-to-point).
        note: the choice and its consequence in one line; empty when there was nothing to choose.
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


def num_gpus() -> int:
    """The number of visible CUDA devices; does not initialise CUDA in this process."""
    import torch

    return torch.cuda.device_count()


def plan(
    local_world_size: int, device: str = "auto", transport: str = "auto", gpus: int | None = None
) -> Plan:
    """Choose backend, devices and transport for the ranks of this machine.

    NCCL needs a GPU per rank. Ranks that share a GPU talk over gloo, with tensors staged through
    host memory, or with ``transport="shared"`` through CUDA IPC.

    Args:
        local_world_size: the number of ranks on this machine.
        device: one of ``DEVICES``.
        transport: one of ``TRANSPORTS``.
        gpus: the number of GPUs to plan for; None counts those of this machine.

    Raises:
        ValueError: an unknown ``device`` or ``transport``, or one that this machine lacks.
    """
    can_share = _can_share(transport)
    check_choice("device", device, DEVICES)
    gpus = num_gpus() if gpus is None else gpus
    if device == "cuda" and not gpus:
        raise ValueError(
            "device 'cuda' was asked for, but this machine shows no CUDA GPU: "
            "use device 'cpu' (every page of the course runs on it) or 'auto'"
        )
    if device == "cpu" or not gpus:
        shared = can_share and transport != "gloo"
        return Plan("gloo", ("cpu",) * local_world_size, "shared" if shared else "torch")
    devices = tuple(f"cuda:{rank % gpus}" for rank in range(local_world_size))
    # On GPUs shared memory is used only on request: NCCL is the standard there.
    moved_by = "shared" if transport == "shared" else "torch"
    if local_world_size <= gpus and transport != "gloo":
        return Plan("nccl", devices, moved_by)
    return Plan("gloo", devices, moved_by, _sharing_note(local_world_size, gpus, moved_by))


def _sharing_note(ranks: int, gpus: int, moved_by: str) -> str:
    """The consequence of having more ranks than GPUs, in one line; empty if there are enough."""
    if ranks <= gpus:
        return ""
    way = "CUDA IPC" if moved_by == "shared" else "gloo through host memory"
    return (
        f"{ranks} ranks share {format_count(gpus, 'GPU')}: they talk over {way}, since "
        "NCCL takes one rank per GPU; times are not those of more GPUs"
    )


def _can_share(transport: str) -> bool:
    """Whether ranks of this machine can talk through shared memory."""
    check_choice("transport", transport, TRANSPORTS)
    # On other systems a semaphore cannot be placed in shared memory.
    on_linux = sys.platform.startswith("linux")
    if transport == "shared" and not on_linux:
        raise ValueError(
            f"transport 'shared' needs Linux, and this is {platform.system()}: use 'gloo', on "
            "which everything runs, or 'auto'"
        )
    return on_linux


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
    """The machine's hardware and system, to be recorded with results measured on it."""
    import torch

    gpus = [torch.cuda.get_device_properties(i).name for i in range(num_gpus())]
    return {
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "memory_gb": round(_memory_bytes() / 1e9, 1),
        "gpus": gpus,
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
