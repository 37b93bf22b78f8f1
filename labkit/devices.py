"""The hardware of this machine, and which device and backend each rank gets."""

import os
import platform
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from labkit import gpus as probe
from labkit.config import parse_devices
from labkit.units import MOST_RANKS, check_choice, check_integer, format_count

DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "shared", "gloo", "nccl")
# A reason, and the sentence for the learner.
Note = tuple[str, str]
UNUSABLE = "unusable"
# The reasons of the notes that this process has printed.
_told: set[str] = set()


@dataclass(frozen=True)
class Plan:
    """Where the ranks of one machine run.

    Attributes:
        backend: ``gloo`` or ``nccl``.
        devices: the device of each local rank, for example ``("cuda:0", "cuda:1")``.
        transport: ``shared`` (memory) or ``torch`` (the backend's own point-to-point).
        notes: (reason, sentence): what the learner has to know of the choice; often empty.
    """

    backend: str
    devices: tuple[str, ...]
    transport: str = "torch"
    notes: tuple[Note, ...] = ()

    @property
    def note(self) -> str:
        """The sentences of the notes in one line."""
        return "; ".join(sentence for _, sentence in self.notes)


def num_cores() -> int:
    """The number of cores this process may use; a container may have fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_gpus() -> int:
    """The number of GPUs that can be used, see ``gpus.found``; CUDA is not initialised here."""
    return len(probe.found().usable)


def plan(
    local_world_size: int,
    device: str = "auto",
    transport: str = "auto",
    gpus: int | None = None,
    devices: str | Sequence[str] | None = None,
) -> Plan:
    """Choose backend, devices and transport for the ranks of this machine.

    NCCL needs a GPU per rank. Ranks that share a GPU talk over gloo, with tensors staged through
    host memory, or with ``transport="shared"`` through CUDA IPC (with ``"nccl"`` over NCCL, where
    that works: ``labkit.runtime.nccl_sharing``). So do ranks on the CPU with
    ranks on GPUs, always over gloo.

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
    can_share = _can_share(transport)
    _check_device(device)
    if devices is not None:
        chosen, notes = _named(local_world_size, device, devices, gpus), ()
    else:
        chosen, notes = _free(local_world_size, device, gpus)
    kinds = {name.partition(":")[0] for name in chosen}
    if "cpu" in kinds:
        _check_for_cpu(transport, chosen)
    if kinds == {"cpu"}:
        shared = can_share and transport != "gloo"
        return Plan("gloo", chosen, "shared" if shared else "torch", notes)
    if len(kinds) > 1:
        return Plan("gloo", chosen, "torch", (*notes, _mixed_note(transport)))
    return _on_gpus(chosen, transport, notes)


def _on_gpus(chosen: tuple[str, ...], transport: str, notes: tuple[Note, ...]) -> Plan:
    """The plan of ranks that are all on GPUs."""
    # On GPUs shared memory is used only on request: NCCL is the standard there.
    moved_by = "shared" if transport == "shared" else "torch"
    if len(set(chosen)) == len(chosen):
        return Plan("gloo" if transport == "gloo" else "nccl", chosen, moved_by, notes)
    if transport == "nccl":
        return Plan("nccl", chosen, moved_by, (*notes, _sharing_note(chosen, "nccl")))
    return Plan("gloo", chosen, moved_by, (*notes, _sharing_note(chosen, moved_by)))


def _check_for_cpu(transport: str, devices: Sequence[str]) -> None:
    if transport == "nccl":
        raise ValueError(
            "transport 'nccl' moves the memory of GPUs only, and these ranks run on "
            f"{' and '.join(sorted(set(devices)))}: use 'auto' or 'gloo'"
        )


def tell_once(notes: Iterable[Note]) -> None:
    """Print the notes of a ``Plan`` to stderr, each reason once per process."""
    for reason, sentence in notes:
        if reason not in _told:
            _told.add(reason)
            print(sentence, file=sys.stderr)


def _usable(gpus: int | None = None) -> tuple[str, ...]:
    """The names of the GPUs that can be used, which may leave gaps; or of that many GPUs."""
    known = tuple(f"cuda:{gpu.index}" for gpu in probe.found().usable) if gpus is None else ()
    count = num_gpus() if gpus is None else gpus
    return known if len(known) == count else tuple(f"cuda:{index}" for index in range(count))


def _check_device(device: str) -> None:
    if isinstance(device, str) and device.startswith("cuda:"):
        raise ValueError(
            f"unknown device {device!r}: it is the kind, one of {', '.join(DEVICES)}. Single GPUs "
            f"are named in devices, one for each rank, as in devices={device!r}"
        )
    check_choice("device", device, DEVICES)


def _free(ranks: int, device: str, gpus: int | None) -> tuple[tuple[str, ...], tuple[Note, ...]]:
    """The devices of ranks for which none are named, and what is to be said of them."""
    if device == "cpu":
        # Which GPUs can be used takes seconds to find out, and does not matter here.
        return ("cpu",) * ranks, ()
    usable, why = _usable(gpus), probe.found().why_not if gpus is None else ""
    if usable:
        notes = ((UNUSABLE, why),) if why else ()
        return tuple(usable[rank % len(usable)] for rank in range(ranks)), notes
    if device == "cuda":
        shows = f"can use no GPU ({why}):" if why else "shows no CUDA GPU:"
        raise ValueError(
            f"device 'cuda' was asked for, but this machine {shows} use device 'cpu' (every page "
            "of the course runs on it) or 'auto'"
        )
    notes = ((UNUSABLE, f"the ranks run on the CPU: {why}"),) if why else ()
    return ("cpu",) * ranks, notes


def _named(
    ranks: int, device: str, devices: str | Sequence[str], gpus: int | None
) -> tuple[str, ...]:
    """The named devices of the ranks, if the machine has them."""
    names = check_named(devices, device, gpus)
    if len(names) < ranks:
        raise ValueError(
            f"devices {','.join(names)!r}: {format_count(len(names), 'device')} for "
            f"{format_count(ranks, 'rank')}: name one per rank (ranks may share one: name it "
            "twice), or leave devices out"
        )
    return names[:ranks]


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
            machine does not have or cannot use.
    """
    names = parse_devices(devices)
    shown = f"devices {','.join(names)!r}"
    if any(device not in ("auto", name.partition(":")[0]) for name in names):
        raise ValueError(f"{shown} contradict device {device!r}: leave out one of the two")
    if set(names) <= {"cpu"} or set(names) <= {"cpu", *(usable := _usable(gpus))}:
        return names
    why = probe.found().why_not if gpus is None else ""
    known = f" ({', '.join(usable)} can be used)" if usable else ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = f". CUDA_VISIBLE_DEVICES is {visible}" if visible else ""
    raise ValueError(
        f"{shown}: this machine has {format_count(len(usable), 'CUDA GPU')}, counted from "
        f"cuda:0; name others, or leave devices out{known}{chosen}{why and f'. {why}'}"
    )


def _sharing_note(devices: Sequence[str], moved_by: str) -> Note:
    """The consequence of having more ranks than GPUs."""
    why = "since NCCL takes one rank per GPU"
    way = f"CUDA IPC, {why}" if moved_by == "shared" else f"gloo through host memory, {why}"
    if moved_by == "nccl":
        way = "NCCL, which NCCL_MULTI_RANK_GPU_ENABLE=1 lets share a GPU"
    return "shared", (
        f"{len(devices)} ranks share {format_count(len(set(devices)), 'GPU')}: they talk over "
        f"{way}; times are not those of more GPUs"
    )


def _mixed_note(transport: str) -> Note:
    if transport == "shared":
        raise ValueError(
            "transport 'shared' is for ranks that are all on the CPU or all on GPUs, and devices "
            "names both: use 'gloo' or 'auto'"
        )
    return "mixed", (
        "ranks on the CPU and on GPUs talk over gloo through host memory, and round in different "
        "ways: their results may differ in the last digits"
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
    """The machine's hardware and system, to be recorded with results measured on it.

    It raises no error, and never initialises CUDA in this process.
    """
    return {
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "memory_gb": round(_memory_bytes() / 1e9, 1),
        "gpus": [gpu.name for gpu in probe.found().usable],
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
