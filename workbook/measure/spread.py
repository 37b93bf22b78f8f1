"""Repeats in numbers and words: median and quartiles, ratios within a repeat, plain tables."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """A measurement: the median of its repeats, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, repeats: Iterable[float]) -> "Spread":
        """The spread of these repeats; ValueError if there are none."""
        values = list(repeats)
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, format_one: Callable[[float], str]) -> str:
        low, high = format_one(self.low), format_one(self.high)
        return f"{format_one(self.median)} ({low} to {high})"


def ratios(others_s: Iterable[float], ours_s: Iterable[float]) -> list[float]:
    """others / ours within each repeat: above 1, ours is faster."""
    return [other / ours for other, ours in zip(others_s, ours_s)]


def rounded(seconds: Iterable[float]) -> list[float]:
    """Round seconds to the nanosecond, for a record."""
    return [round(one, 9) for one in seconds]


def step_record(
    seconds: list[float], ratio_to: dict[str, list[float]], time: str = "step_s"
) -> dict[str, Any]:
    """The part of a record on one contender: its repeats, and its ratios to others by name."""
    return {
        "seconds": rounded(seconds),
        time: asdict(Spread.of(seconds)),
        "ratio_to": {name: asdict(Spread.of(repeats)) for name, repeats in ratio_to.items()},
    }


def table(header: list[str], rows: list[list[str]]) -> str:
    """Aligned plain text, two spaces between columns; an empty row is an empty line."""
    filled = [row for row in rows if row]
    widths = [max(map(len, column)) for column in zip(header, *filled)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in [header, *rows]
    )
