"""What this machine has, and which device and backend each rank gets."""

import os
import platform
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Plan:
    """Where the ranks of one machine run.

    Attributes:
        backend: ``gloo`` or ``nccl``.
        devices: the device of each local rank, for example ``("cuda:0", "cuda:1")``.
        note: the choice and its consequence in one line; empty when there was nothing to choose.
    """

    backend: str
    devices: tuple[str, ...]
    note: str = ""


def num_cores() -> int:
    """The cores this process may use (a container may allow fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_gpus() -> int:
    """The visible CUDA devices, counted without initialising CUDA in this process."""
    import torch

    return torch.cuda.device_count()


def plan(local_world_size: int, device: str = "auto", gpus: int | None = None) -> Plan:
    """Choose backend and devices for the ranks of this machine.

    NCCL needs a GPU for each rank. Ranks that share one talk over gloo, their tensors staged
    through host memory.

    Raises:
        ValueError: an unknown ``device``, or ``cuda`` where there is none.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is not known: use one of {', '.join(DEVICES)}")
    gpus = num_gpus() if gpus is None else gpus
    if device == "cuda" and not gpus:
        raise ValueError(
            "device 'cuda' was asked for, but this machine shows no CUDA GPU: "
            "use device 'cpu' (every page of the course runs on it) or 'auto'"
        )
    if device == "cpu" or not gpus:
        return Plan("gloo", ("cpu",) * local_world_size)
    devices = tuple(f"cuda:{rank % gpus}" for rank in range(local_world_size))
    if local_world_size <= gpus:
        return Plan("nccl", devices)
    note = (
        f"{local_world_size} ranks share {gpus} GPU{'s' if gpus > 1 else ''}: they talk over gloo "
        "through host memory, since NCCL takes one rank a GPU; times are not those of more GPUs"
    )
    return Plan("gloo", devices, note)


def check_world_size(world_size: int, *, warn: bool = True) -> None:
    """Refuse a world size that cannot be; warn of one that this machine will feel.

    Raises:
        ValueError: not a whole number from 1.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number from 1, got {world_size!r}")
    cores = num_cores()
    if warn and world_size > 4 * cores:
        warnings.warn(
            f"world_size {world_size} is far above this machine's {cores} cores: "
            "the ranks take turns, and each needs about 0.3 GB of memory",
            stacklevel=3,
        )


def hardware() -> dict[str, Any]:
    """The machine, for results that name what they were measured on."""
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
    """The software, for the same purpose."""
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
