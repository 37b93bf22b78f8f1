"""What the lanes of a timeline are called: rank, device and peak memory, also in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.comm.peak_memory import PeakMemory
from labkit.tracing import Trace
from labkit.units import format_bytes

# With more lanes, a lane is too low for a second line.
_MOST_TALL = 15
# Of more ranks, only those with the most and the least memory are named.
_MOST_NAMED = 4

Peaks = Mapping[int, PeakMemory]


def peaks_of(result: Any) -> Peaks:
    """The peak memory of the ranks of a result, as far as it is known."""
    peaks: Sequence[PeakMemory | None] = getattr(result, "peak_memory", ())
    return {rank: peak for rank, peak in enumerate(peaks) if peak and peak.by_device}


def lane_names(trace: Trace, ranks: Sequence[int], peaks: Peaks) -> tuple[str, list[str]]:
    """The label of the axis, and that of each lane: ``0 · cuda:0``, and its peak memory below."""
    has_devices = any(rank in trace.devices for rank in ranks)
    has_peaks = len(ranks) <= _MOST_TALL and any(rank in peaks for rank in ranks)
    names = []
    for rank in ranks:
        name = trace.lane(rank).removeprefix("rank ")
        if has_peaks and rank in peaks:
            name += f"\n{' + '.join(map(format_bytes, peaks[rank].by_device.values()))}"
        names.append(name)
    label = "rank · device" if has_devices else "rank"
    return f"{label},\npeak memory" if has_peaks else label, names


def device_words(trace: Trace, ranks: Sequence[int]) -> str:
    """Which ranks are on which GPU, in a sentence; empty if none is on a GPU."""
    of_device: dict[str, list[int]] = {}
    for rank in ranks:
        if device := trace.devices.get(rank):
            of_device.setdefault(device, []).append(rank)
    if not of_device.keys() - {"cpu"}:
        return ""
    parts = [
        f"{_names(mine)} {'share' if len(mine) > 1 and name != 'cpu' else 'on'} {name}"
        for name, mine in of_device.items()
    ]
    return f"Devices: {'; '.join(parts)}."


def memory_words(peaks: Peaks, noun: str = "rank") -> str:
    """The peak memory of each rank, or of many ranks the most and the least; empty if unknown."""
    sizes = {rank: peak.by_device for rank, peak in peaks.items()}
    if not sizes:
        return ""
    if len(sizes) <= _MOST_NAMED:
        return f"Peak memory: {', '.join(_one(noun, *item) for item in sizes.items())}."
    by_size = sorted(sizes.items(), key=lambda item: max(item[1].values()))
    most, least = _one(noun, *by_size[-1]), _one(noun, *by_size[0])
    return f"Peak memory: at most {most}, at least {least}."


def _one(noun: str, rank: int, sizes: Mapping[str, int]) -> str:
    parts = [
        format_bytes(size) + ("" if name == "cpu" else f" on {name}")
        for name, size in sizes.items()
    ]
    return f"{noun} {rank} {' and '.join(parts)}"


def _names(ranks: Sequence[int]) -> str:
    """``rank 0``; ``ranks 0, 1 and 2``; of many, how many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 * _MOST_NAMED:
        return f"{len(ranks)} ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
