"""Peak memory: what a rank's process, and its tensors on GPUs, took at most.

On a GPU, PyTorch's caching allocator counts: neither the CUDA context, some hundred MB a process,
nor what libraries such as NCCL take for themselves.

On the host, Linux keeps the peak of the resident memory (VmHWM), which a process may set back
(``clear_refs``). A rank begins as a copy of the forkserver, with hundreds of MB that all ranks
share, so only what is added counts. Pages of files do not count, because their first use reads
code of torch into memory; pages that a rank shares with others, such as those of its messages, do.

Source: Linux, proc_pid_status(5) and proc_pid_clear_refs(5).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from labkit.units import format_bytes

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SET_PEAK_BACK = b"5"


@dataclass(frozen=True)
class DeviceMemory:
    """The peaks of PyTorch's caching allocator on one GPU: of tensors, and with what it kept."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class PeakMemory:
    """The most memory that one rank took; it prints as text.

    Attributes:
        process_bytes: host memory that its process added, without that of processes which it has
            started; None where the system does not say.
        devices: by name, each GPU that the rank used; empty for a rank on the CPU.
    """

    process_bytes: int | None
    devices: Mapping[str, DeviceMemory] = field(default_factory=dict)

    @property
    def by_device(self) -> dict[str, int]:
        """Bytes by the device that computed: tensors on each GPU, or the process on ``cpu``."""
        if self.devices:
            return {name: one.allocated_bytes for name, one in self.devices.items()}
        return {} if self.process_bytes is None else {"cpu": self.process_bytes}

    @property
    def largest_bytes(self) -> int | None:
        """Of the device on which the rank took most; None where that is not known."""
        return max(self.by_device.values(), default=None)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "PeakMemory":
        """From what ``as_dict`` has made."""
        devices = {
            name: DeviceMemory(one["allocated_bytes"], one["reserved_bytes"])
            for name, one in found["devices"].items()
        }
        return cls(found["process_bytes"], devices)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(replace(self, devices=dict(self.devices)))

    def __str__(self) -> str:
        parts = [
            f"{name} {format_bytes(one.allocated_bytes)} "
            f"({format_bytes(one.reserved_bytes)} reserved)"
            for name, one in self.devices.items()
        ]
        if self.process_bytes is not None:
            whose = "process " if parts else ""
            parts.append(f"{whose}{format_bytes(self.process_bytes)}")
        return ", ".join(parts) or "unknown"

    def most(self, other: "PeakMemory | None") -> "PeakMemory":
        """The larger of each number; a process's peak is unknown if one of the two is."""
        if other is None:
            return self
        devices = dict(self.devices)
        for name, one in other.devices.items():
            mine = devices.get(name, one)
            devices[name] = DeviceMemory(
                max(mine.allocated_bytes, one.allocated_bytes),
                max(mine.reserved_bytes, one.reserved_bytes),
            )
        if self.process_bytes is None or other.process_bytes is None:
            return PeakMemory(None, devices)
        return PeakMemory(max(self.process_bytes, other.process_bytes), devices)

    def above(self, start_bytes: int | None) -> "PeakMemory":
        """This peak with the process's memory counted from ``start_bytes``."""
        if self.process_bytes is None or start_bytes is None:
            return replace(self, process_bytes=None)
        return replace(self, process_bytes=max(0, self.process_bytes - start_bytes))


class MemoryMeter:
    """Measures the peak memory of this process, in laps.

    The system and the allocator keep one peak each. A lap reads it and sets it back, so the peak
    of a part of the run and that of the whole run can both be known.

    Args:
        device: the rank's, which is reported even if nothing was allocated on it.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._start_bytes = _own(_status())
        self._total: PeakMemory | None = None
        self._can_set_back = self._set_back()

    def lap(self) -> PeakMemory:
        """The peak since the last lap, of which the process's is not relative to any start."""
        status, devices = _status(), {}
        for index in _gpus():
            peak = DeviceMemory(
                torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index)
            )
            if peak.reserved_bytes or f"cuda:{index}" == str(self._device):
                devices[f"cuda:{index}"] = peak
        process_bytes = _own(status) if self._can_set_back else None
        if process_bytes is not None:
            # Of the pages of files there are more by now than at the peak.
            process_bytes = max(process_bytes, status["VmHWM"] - status["RssFile"])
        found = PeakMemory(process_bytes, devices)
        self._set_back()
        self._total = found.most(self._total)
        return found

    def total(self) -> PeakMemory:
        """The peak since this meter was made, of which the process's counts from then."""
        self.lap()
        assert self._total is not None, "it has a lap"
        return self._total.above(self._start_bytes)

    def part(self, arrived_bytes: int = 0) -> "Part":
        """The peak of some stretches of the run, counted from now, less ``arrived_bytes``."""
        own_bytes = _own(_status())
        return Part(self, None if own_bytes is None else own_bytes - arrived_bytes)

    def _set_back(self) -> bool:
        """Begin a lap; False where the process's peak cannot be set back."""
        for index in _gpus():
            torch.cuda.reset_peak_memory_stats(index)
        with suppress(OSError):
            _CLEAR_REFS.write_bytes(_SET_PEAK_BACK)
            return True
        return False


class Part:
    """The peak of those stretches of a run that are under ``counted``.

    Attributes:
        peak: of all stretches so far; None before the first.
    """

    def __init__(self, meter: MemoryMeter, start_bytes: int | None):
        self._meter, self._start_bytes = meter, start_bytes
        self.peak: PeakMemory | None = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._meter.lap()
        yield
        self.peak = self._meter.lap().above(self._start_bytes).most(self.peak)


def as_dicts(peaks: list[PeakMemory | None]) -> list[dict[str, Any] | None]:
    """The peaks of all ranks for JSON; None for a rank that was lost."""
    return [None if peak is None else peak.as_dict() for peak in peaks]


def _status() -> dict[str, int]:
    """Bytes by field of this process's status; empty where the system has no such file."""
    with suppress(OSError):
        rows = (line.split() for line in _STATUS.read_text().splitlines())
        return {row[0][:-1]: int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}
    return {}


def _own(status: Mapping[str, int]) -> int | None:
    """Resident memory without the pages of files."""
    return status["RssAnon"] + status["RssShmem"] if status else None


def _gpus() -> range:
    """The GPUs that may have tensors of this process; none, if it has not initialised CUDA."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
