"""The hardware of this machine, and which device and backend each rank gets."""

import os
import platform
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.engine.gpus import num_gpus, nvidia_smi
from labkit.units import MOST_RANKS, check_choice, check_integer, format_count, parse_devices

DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "shared", "gloo")
# The notes that this process has printed.
_printed: set[str] = set()


@dataclass(frozen=True)
class Plan:
    """The devices and the backend of the ranks of one machine.

    Attributes:
        backend: ``gloo`` or ``nccl``.
        devices: the device of each local rank, for example ``("cuda:0", "cuda:1")``.
        transport: ``shared`` (memory) or ``torch`` (the backend's own point-to-point).
        note: a sentence on the choice for the learner; often empty.
    """

    backend: str
    devices: tuple[str, ...]
    transport: str = "torch"
    note: str = ""


def num_cores() -> int:
    """The number of cores this process may use; a container may have fewer than the machine."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def plan(
    local_world_size: int,
    device: str = "auto",
    transport: str = "auto",
    devices: str | Sequence[str] | None = None,
) -> Plan:
    """Choose backend, devices and transport for the ranks of this machine.

    NCCL takes one rank per GPU; others talk over gloo, with tensors staged through host memory.

    Args:
        local_world_size: the number of ranks on this machine.
        device, transport: one of ``DEVICES``, one of ``TRANSPORTS``.
        devices: the device of each rank, in rank order, see ``units.parse_devices``; those left
            over are not used. None: the GPUs in turn, or the CPU, as ``device`` says.
    """
    check_choice("transport", transport, TRANSPORTS)
    chosen = _devices_of(local_world_size, device, devices)
    kinds = {name.partition(":")[0] for name in chosen}
    # On other systems a semaphore cannot be placed in shared memory.
    can_share = kinds == {"cpu"} and sys.platform == "linux"
    if transport == "shared" and not can_share:
        raise ValueError(
            "transport 'shared' is for ranks that are all on the CPU, on Linux: use 'gloo', on "
            "which everything runs, or 'auto'"
        )
    if kinds == {"cpu"}:
        if can_share and transport != "gloo":
            return Plan("gloo", chosen, "shared")
        return Plan("gloo", chosen)
    if len(kinds) > 1:
        note = (
            "ranks on the CPU and on GPUs talk over gloo through host memory, and round in "
            "different ways: their results may differ in the last digits"
        )
        return Plan("gloo", chosen, note=note)
    if len(set(chosen)) == len(chosen):
        return Plan("gloo" if transport == "gloo" else "nccl", chosen)
    note = (
        "ranks share a GPU: they talk over gloo through host memory, since NCCL takes one rank "
        "per GPU; times are not those of more GPUs"
    )
    return Plan("gloo", chosen, note=note)


def _devices_of(ranks: int, device: str, devices: str | Sequence[str] | None) -> tuple[str, ...]:
    """The device of each rank of this machine."""
    check_choice("device", device, DEVICES)
    if devices is not None:
        chosen = check_named(devices, device)
        if len(chosen) < ranks:
            raise ValueError(
                f"devices {','.join(chosen)!r}: {format_count(len(chosen), 'device')} for "
                f"{format_count(ranks, 'rank')}: name one per rank (one that they share, twice)"
            )
        return chosen[:ranks]
    count = 0 if device == "cpu" else num_gpus()
    if device == "cuda" and not count:
        raise ValueError(
            "device 'cuda' was asked for, but this machine shows no CUDA GPU: use device "
            "'cpu' (every page of the course runs on it) or 'auto'"
        )
    if not count:
        return ("cpu",) * ranks
    return tuple(f"cuda:{rank % count}" for rank in range(ranks))


def check_named(devices: str | Sequence[str], device: str = "auto") -> tuple[str, ...]:
    """The names in ``devices``, see ``plan``, if this machine has all of them."""
    names = parse_devices(devices)
    shown = f"devices {','.join(names)!r}"
    if any(device not in ("auto", name.partition(":")[0]) for name in names):
        raise ValueError(f"{shown} contradict device {device!r}: leave out one of the two")
    if set(names) <= {"cpu"}:
        return names
    count = num_gpus()
    if not set(names) <= {"cpu", *(f"cuda:{index}" for index in range(count))}:
        raise ValueError(
            f"{shown}: this machine has {format_count(count, 'CUDA GPU')}, counted from cuda:0; "
            "name others, or leave devices out"
        )
    return names


def print_once(note: str) -> None:
    """Print the note of a ``Plan`` to stderr, once per process."""
    if note and note not in _printed:
        _printed.add(note)
        print(note, file=sys.stderr)


def check_world_size(world_size: int, *, warn: bool = True) -> None:
    """ValueError for an impossible world size; warn if it is too large for this machine."""
    check_integer("world_size", world_size, most=MOST_RANKS)
    if warn and world_size > 4 * num_cores():
        warnings.warn(
            f"world_size {world_size} is far above this machine's "
            f"{format_count(num_cores(), 'core')}: ranks take turns, and need 0.3 GB each",
            stacklevel=3,  # the caller of ``run``
        )


def hardware() -> dict[str, Any]:
    """The machine's hardware and system, to be recorded; CUDA is not initialized."""
    cpu = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        match = re.search(r"model name.*?: (.*)", Path("/proc/cpuinfo").read_text())
        if match:
            cpu = match[1]
    count = num_gpus()
    gpus = []
    if count:
        names = nvidia_smi("--query-gpu=name", "--format=csv,noheader")
        gpus = names.splitlines()[:count] or [f"cuda:{index}" for index in range(count)]
    return {
        "cpu": cpu,
        "cores": num_cores(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """The versions on which results depend, to be recorded with them."""
    import torch

    import labkit

    frameworks = {"python": platform.python_version(), "torch": torch.__version__}
    return frameworks | {"numpy": version("numpy"), "labkit": labkit.__version__}
