"""Repeats in numbers and words: median and quartiles, ratios within a repeat, plain tables."""

import html
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from labkit.units import html_table, text_table


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


@dataclass(frozen=True, repr=False)
class Table:
    """A table as text, and as HTML in a notebook; ``notes`` are sentences below it."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([text_table(self.heads, self.rows), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "<br>".join(map(html.escape, self.notes))
        return html_table(self.heads, self.rows) + (f"<p>{notes}</p>" if notes else "")


def table(header: list[str], rows: list[list[str]]) -> str:
    """Aligned plain text, two spaces between columns; an empty row is an empty line."""
    filled = [row for row in rows if row]
    widths = [max(map(len, column)) for column in zip(header, *filled)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in [header, *rows]
    )
