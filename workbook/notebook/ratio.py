"""How two measurements compare: a ratio with its spread, in numbers and in words."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.units import format_count, format_number

# From this many repeats on, the spread is that of the middle half: one outlier says little.
_QUARTILES = 8


@dataclass(frozen=True)
class Ratio:
    """How many times as large ``one`` is as ``other``; of seconds: how many times as fast.

    Attributes:
        low, median, high: the ratio and its spread: that of all repeats if there are fewer than
            8, otherwise the quartiles.
        repeats: the number of repeats and what they are, in words: ``5 pairs``.
    """

    low: float
    median: float
    high: float
    repeats: str

    @classmethod
    def of(cls, one: Sequence[float], other: Sequence[float], paired: bool) -> "Ratio":
        """Compare repeats in seconds (or another unit).

        Args:
            one, other: the repeats, above 0.
            paired: repeat k of both were taken in turns, so that their ratio is not affected by
                what changes on the machine in between. Otherwise all repeats are compared.
        """
        for values in (one, other):
            if not all(0 < value < float("inf") for value in values):
                raise ValueError(f"repeats must be numbers above 0, got {list(values)}")
        if paired:
            count = format_count(len(one), "pair")
            return cls(*middle([a / b for a, b in zip(one, other)]), repeats=count)
        (low, median, high), (least, usual, most) = middle(one), middle(other)
        count = f"{len(one)} and {format_count(len(other), 'repeat')}"
        if len(one) == len(other):
            count = f"{format_count(len(one), 'repeat')} of each"
        return cls(low / most, median / usual, high / least, count)

    @property
    def is_larger(self) -> bool | None:
        """Whether the ratio is above 1; None if the spread includes 1, or there is no spread."""
        if self.low <= 1 <= self.high or self.has_no_spread:
            return None
        return self.low > 1

    @property
    def has_no_spread(self) -> bool:
        """Whether each side was measured only once."""
        return self.repeats in ("1 pair", "1 repeat of each")

    @property
    def inverse(self) -> "Ratio":
        """How many times as large ``other`` is as ``one``."""
        return Ratio(1 / self.high, 1 / self.median, 1 / self.low, self.repeats)

    @property
    def spread(self) -> str:
        """The spread in words, for brackets."""
        if self.has_no_spread:
            return "measured once"
        return f"{format_number(self.low)} to {format_number(self.high)} in {self.repeats}"

    def __str__(self) -> str:
        return f"{format_number(self.median)} times"


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high): the range of a few values, the quartiles of 8 or more."""
    if len(values) < _QUARTILES:
        return min(values), statistics.median(values), max(values)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
