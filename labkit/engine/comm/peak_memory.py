"""Peak memory: the most that a rank's process, and its tensors on GPUs, took.

On a GPU, PyTorch's caching allocator counts: neither the CUDA context nor what libraries such as
NCCL take. On the host, Linux keeps the peak of the resident memory (VmHWM), which a process may
set back (``clear_refs``). A rank begins as a copy of the forkserver, with hundreds of MB that all
ranks share, so only what is added counts. Pages of files do not, because their first use reads
code of torch into memory; pages shared with other ranks, such as those of its messages, do.

Source: Linux, proc_pid_status(5) and proc_pid_clear_refs(5).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from labkit.units import format_bytes

# Bytes by device: the tensors on each GPU, or the process on ``cpu``. ``|`` takes the larger.
Peaks = Counter[str]


@dataclass(frozen=True)
class PeakMemory:
    """The most memory that one rank took; it prints as text.

    Attributes:
        process_bytes: host memory that its process added, without that of processes which it has
            started; None where the system does not say.
        devices: by name, bytes of tensors on each GPU that the rank used; empty on the CPU.
    """

    process_bytes: int | None
    devices: dict[str, int] = field(default_factory=dict)

    @property
    def by_device(self) -> dict[str, int]:
        """Bytes by the device that computed: tensors on each GPU, or the process on ``cpu``."""
        if self.devices or self.process_bytes is None:
            return self.devices
        return {"cpu": self.process_bytes}

    def __str__(self) -> str:
        parts = [f"{name} {format_bytes(size)}" for name, size in self.devices.items()]
        if self.process_bytes is not None:
            label = "process " if parts else ""
            parts.append(f"{label}{format_bytes(self.process_bytes)}")
        return ", ".join(parts) or "unknown"


class MemoryMeter:
    """A meter of this process's peak memory, in laps: each reads the system's and sets it back."""

    def __init__(self) -> None:
        self._peaks = Peaks()
        self.lap()
        self._start_bytes = own_bytes(_status())
        self._peaks = Peaks()

    def lap(self) -> Peaks:
        """Return the peaks since the last lap; the process's is not relative to any start."""
        status = _status()
        peaks = Peaks()
        num_gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        for index in range(num_gpus):
            peaks[f"cuda:{index}"] = torch.cuda.max_memory_allocated(index)
            torch.cuda.reset_peak_memory_stats(index)
        with suppress(OSError, KeyError):
            Path("/proc/self/clear_refs").write_text("5")
            # Of the pages of files there are more by now than at the peak.
            peaks["cpu"] = max(own_bytes(status), status["VmHWM"] - status["RssFile"])
        self._peaks |= peaks
        return peaks

    def total(self) -> PeakMemory:
        """Return the peak since this meter was made."""
        self.lap()
        return _above(self._peaks, self._start_bytes)


class Part:
    """The peak of what is ``counted``, with ``arrived_bytes`` that the rank holds already."""

    def __init__(self, meter: MemoryMeter, arrived_bytes: int = 0):
        self._meter = meter
        self._start_bytes = own_bytes(_status()) - arrived_bytes
        self._peaks = Peaks()
        self.peak: PeakMemory | None = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._meter.lap()
        yield
        self._peaks |= self._meter.lap()
        self.peak = _above(self._peaks, self._start_bytes)


def own_bytes(status: Mapping[str, int]) -> int:
    """Return resident memory without the pages of files; 0 where the system does not say."""
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def _above(peaks: Peaks, start_bytes: int) -> PeakMemory:
    devices = {name: size for name, size in peaks.items() if name != "cpu"}
    process_bytes = max(0, peaks["cpu"] - start_bytes) if "cpu" in peaks else None
    return PeakMemory(process_bytes, devices)


def _status() -> Mapping[str, int]:
    """Read the bytes by field of this process's status; empty where there is no such file."""
    num_bytes = {}
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, *values = line.split()
            if values[1:] == ["kB"]:
                num_bytes[name.removesuffix(":")] = int(values[0]) * 1024
    return num_bytes
