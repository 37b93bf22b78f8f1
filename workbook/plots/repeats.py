"""Repeats of a measurement: their quartiles, and the words for them in captions."""

import statistics
from collections.abc import Iterable, Sequence

from labkit.units import format_number


def quartiles(repeats: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile; for a single value, that value twice."""
    if len(repeats) < 2:
        return repeats[0], repeats[0]
    low, _, high = statistics.quantiles(repeats, n=4, method="inclusive")
    return low, high


def range_words(values: Iterable[float]) -> str:
    """``0.889 to 1.25``, or ``2`` where both ends are written the same."""
    values = list(values)
    low, high = format_number(min(values)), format_number(max(values))
    return low if low == high else f"{low} to {high}"


def counts_words(series: Iterable[Sequence[float]]) -> str:
    """How many repeats there are: ``5``, or ``3 or 5``; empty if each was measured once."""
    counts = sorted({len(repeats) for repeats in series})
    return " or ".join(map(str, counts)) if counts and counts[-1] > 1 else ""
