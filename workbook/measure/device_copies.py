"""The bandwidth of copies between the devices of this machine, measured by CUDA events.

PyTorch copies on the current stream of the source GPU (of the target, from the host), after what
is queued on the target's current stream, which then waits for the copy. So each copy here has a
stream of its own at both ends: copies over different links run at the same time, and the events
are on the stream that copies.
"""

import contextlib
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_COPY_BYTES = 64 * 2**20
_IN_A_ROW = 4
_REPEATS = 7


@dataclass
class _Link:
    """One way from a device to another: the tensors at both ends, and the streams."""

    source: Tensor
    target: Tensor
    streams: tuple[Any, ...]

    @classmethod
    def between(cls, source: str, target: str, num_bytes: int, pinned: bool = True) -> "_Link":
        # The last one is of the GPU that copies, and becomes the current device.
        on_gpus = [device for device in (target, source) if device != "cpu"]
        streams = tuple(torch.cuda.Stream(device) for device in on_gpus)
        ends = (_memory(device, num_bytes, pinned) for device in (source, target))
        return cls(*ends, streams=streams)

    def queue(self) -> tuple[Any, Any]:
        """Queue a few copies, and the events before and after them."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with contextlib.ExitStack() as stack:
            for stream in self.streams:
                stack.enter_context(torch.cuda.stream(stream))
            start.record(self.streams[-1])
            for _ in range(_IN_A_ROW):
                self.target.copy_(self.source, non_blocking=True)
            end.record(self.streams[-1])
        return start, end


def _memory(device: str, num_bytes: int, pinned: bool) -> Tensor:
    pinned = pinned and device == "cpu"
    return torch.ones(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def _seconds(links: Sequence[_Link], repeats: int) -> list[float]:
    """Seconds of a copy by repeat, all links at the same time, the slowest; one to warm up."""
    found = []
    gpus = {stream.device for link in links for stream in link.streams}
    for _ in range(repeats + 1):
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        events = [link.queue() for link in links]
        for _, end in events:
            end.synchronize()
        found.append(max(start.elapsed_time(end) for start, end in events) / 1e3 / _IN_A_ROW)
    return found[1:]


def ring_bytes_per_s(devices: Sequence[str], num_bytes: int = _COPY_BYTES) -> float:
    """Bytes per second from each of ``devices`` to the next, all at once; that of the slowest.

    This is what the links can carry of a ring. The devices are different GPUs.
    """
    neighbours = zip(devices, [*devices[1:], devices[0]])
    links = [_Link.between(source, target, num_bytes) for source, target in neighbours]
    return num_bytes / statistics.median(_seconds(links, _REPEATS))


def measure_copies(
    gpus: Sequence[str], num_bytes: int = _COPY_BYTES, repeats: int = _REPEATS
) -> list[dict[str, Any]]:
    """Time a copy between each two GPUs, and between GPU and host memory; a row for each way.

    Returns:
        ``source``, ``target``, ``pinned`` (of the host's memory), ``num_bytes``, ``seconds`` by
        repeat, and ``bytes_per_s`` of their median.
    """
    ways = [(*pair, True) for pair in itertools.permutations(gpus, 2)]
    for gpu, pinned in itertools.product(gpus, (True, False)):
        ways += [(gpu, "cpu", pinned), ("cpu", gpu, pinned)]
    rows = []
    for source, target, pinned in ways:
        seconds = _seconds([_Link.between(source, target, num_bytes, pinned)], repeats)
        row: dict[str, Any] = {"source": source, "target": target, "num_bytes": num_bytes}
        if "cpu" in (source, target):
            row["pinned"] = pinned
        row["seconds"] = seconds
        rows.append(row | {"bytes_per_s": num_bytes / statistics.median(seconds)})
    return rows
