"""The sentence on which of several runs took the least memory, made from the measurement."""

from collections.abc import Mapping

from labkit.comm.peak_memory import PeakMemory
from labkit.units import format_bytes, format_number
from workbook.notebook.verdict import Run, Verdict

# Runs of the same program differ by some percent: pages, and what the allocator keeps.
_TELLS = 1.1


def peak_memory(runs: Mapping[str, Run]) -> Verdict:
    """Which run took the least memory on the rank, or the GPU, that took most of it.

    Args:
        runs: by name, each measured once.

    Raises:
        ValueError: fewer than two names.
    """
    if len(runs) < 2:
        raise ValueError(f"got {list(runs)}: nothing to compare, give two runs or more")
    found = {name: _largest(run) for name, run in runs.items()}
    if unknown := [name for name, one in found.items() if one is None]:
        names = ", ".join(unknown)
        return Verdict(f"The peak memory of {names} is not known: the system does not say.", None)
    sizes = {name: one for name, one in found.items() if one is not None}
    first, *others = sorted(sizes, key=lambda name: sizes[name][0])
    least_bytes, where = sizes[first]
    text = f"Least peak memory: {first}, {format_bytes(least_bytes)} on {where}"
    for name in others:
        text += f"; {name} took {_times(sizes[name][0], least_bytes)} ({sizes[name][1]})"
    return Verdict(f"{text}.", True if sizes[others[0]][0] > _TELLS * least_bytes else None)


def _largest(run: Run) -> tuple[int, str] | None:
    """The largest peak of a run, and where it was; None if a rank's is not known."""
    peaks: list[PeakMemory | None] = run.peak_memory
    # A rank that was lost has none.
    by_place = [
        (size, f"rank {rank}" if device == "cpu" else f"rank {rank}, {device}")
        for rank, peak in enumerate(peaks)
        for device, size in (peak.by_device if peak else {}).items()
    ]
    if not by_place or any(peak and peak.largest_bytes is None for peak in peaks):
        return None
    return max(by_place)


def _times(size: int, least_bytes: int) -> str:
    if size <= _TELLS * least_bytes:
        return f"about as much, {format_bytes(size)}"
    if not least_bytes:
        return format_bytes(size)
    return f"{format_number(size / least_bytes)} times as much, {format_bytes(size)}"
