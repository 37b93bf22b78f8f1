"""Repeats in numbers and words: median and quartiles, ratios within a repeat, tables."""

import html
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from tabulate import tabulate


@dataclass(frozen=True)
class Spread:
    """A measurement: the median of its repeats, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, repeats: Iterable[float]) -> "Spread":
        """The spread of these repeats, of which there is at least one."""
        low, median, high = np.quantile(list(repeats), (0.25, 0.5, 0.75)).tolist()
        return cls(median, low, high)

    @property
    def whiskers(self) -> tuple[float, float]:
        """How far the quartiles are below and above the median, as error bars need it."""
        return self.median - self.low, self.high - self.median

    def text(self, format_one: Callable[[float], str]) -> str:
        low, high = format_one(self.low), format_one(self.high)
        return f"{format_one(self.median)} ({low} to {high})"


def ratios(others_s: Iterable[float], ours_s: Iterable[float]) -> list[float]:
    """others / ours within each repeat: above 1, ours is faster."""
    return [other / ours for other, ours in zip(others_s, ours_s)]


def rounded(seconds: Iterable[float]) -> list[float]:
    """Round seconds to the nanosecond, for a record."""
    return [round(one, 9) for one in seconds]


@dataclass(frozen=True, repr=False)
class Table:
    """A table as text, and as HTML in a notebook; ``notes`` are sentences below it."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = tabulate(self.rows, self.heads, tablefmt="plain", disable_numparse=True)
        return "\n".join([*(line.rstrip() for line in shown.splitlines()), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        shown = tabulate(self.rows, self.heads, tablefmt="html", disable_numparse=True)
        return shown + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
