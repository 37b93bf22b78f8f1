"""The alpha-beta model of a link, and how it is fitted to measured messages.

Symbols: alpha seconds per message of any size, beta seconds per byte sent, gamma seconds per byte
added.
Sources: Hockney, "The communication challenge for MPP" (1994), for alpha and beta; Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005),
section 3, for all three.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.units import format_count, format_number, format_seconds


@dataclass(frozen=True)
class Link:
    """Seconds of a message between two ranks, alpha + beta x bytes; adding it, gamma x bytes.

    The model leaves out that messages share a memory bus, a network card or a core: with more
    ranks than cores a collective takes longer than predicted.

    Attributes:
        alpha_s: seconds per message, even an empty one (latency, start-up).
        beta_s_per_byte: seconds per byte sent; 1 / beta is the bandwidth.
        gamma_s_per_byte: seconds to add one received byte.

    Raises:
        ValueError: a negative or infinite cost.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: a cost is a finite number, 0 or more")

    def message_seconds(self, num_bytes: float) -> float:
        """Seconds that one message of ``num_bytes`` takes."""
        return self.alpha_s + self.beta_s_per_byte * num_bytes

    def __str__(self) -> str:
        """``52 µs per message, 3.1 GB/s``; with a gamma, also how fast additions are."""
        text = f"{format_seconds(self.alpha_s)} per message, {_rate(self.beta_s_per_byte)}"
        added = f", {_rate(self.gamma_s_per_byte)} added" if self.gamma_s_per_byte else ""
        return text + added


def fit_link(
    sizes_bytes: Sequence[float], seconds: Sequence[float], gamma_s_per_byte: float = 0.0
) -> Link:
    """The alpha and beta that best explain measured messages: seconds = alpha + beta x bytes.

    Least squares of the *relative* errors: otherwise the largest sizes would decide alone, and
    alpha would be lost in their noise. Several measurements of one size are replaced by
    their median, as a repeat that another program disturbs is always too slow. If the best line
    has a negative alpha (or beta), it is set to 0 and the other is fitted alone.

    Args:
        sizes_bytes: of the measured messages; at least two different sizes.
        seconds: of each message, above 0.
        gamma_s_per_byte: of the result; measured separately, as no message includes an addition.

    Raises:
        ValueError: the lists differ in length, have fewer than two sizes, or contain a value that
            cannot be a measurement.
    """
    points = _medians(sizes_bytes, seconds)
    weights = [1 / time_s**2 for _, time_s in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points)) / total
    mean_s = sum(w * time_s for w, (_, time_s) in zip(weights, points)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points))
    joint = sum(w * (size - mean_size) * (t - mean_s) for w, (size, t) in zip(weights, points))
    beta = joint / spread
    alpha = mean_s - beta * mean_size
    if beta < 0:
        alpha, beta = mean_s, 0.0
    elif alpha < 0:
        through_zero = sum(w * size * size for w, (size, _) in zip(weights, points))
        alpha, beta = 0.0, sum(w * n * t for w, (n, t) in zip(weights, points)) / through_zero
    return Link(alpha, beta, gamma_s_per_byte)


def _rate(seconds_per_byte: float) -> str:
    if not seconds_per_byte:
        return "bytes at no cost"
    per_s = 1 / seconds_per_byte
    scale, unit = (1e9, "GB/s") if per_s >= 0.9995e9 else (1e6, "MB/s")
    return f"{format_number(per_s / scale)} {unit}"


def _medians(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, float]]:
    """(size, median seconds) by size; checks the arguments of ``fit_link``."""
    if len(sizes_bytes) != len(seconds):
        sizes, times = (len(sizes_bytes), "size"), (len(seconds), "time")
        counts = f"{format_count(*sizes)} and {format_count(*times)}"
        raise ValueError(f"{counts}: give one time per size")
    by_size: dict[float, list[float]] = {}
    for size, time_s in zip(sizes_bytes, seconds):
        if not (math.isfinite(size) and size >= 0 and math.isfinite(time_s) and time_s > 0):
            raise ValueError(
                f"{size} bytes in {time_s} s is not a measurement: give sizes from 0 up "
                "and seconds above 0"
            )
        by_size.setdefault(size, []).append(time_s)
    if len(by_size) < 2:
        raise ValueError(
            f"a line needs two different sizes, got {sorted(by_size)}: measure "
            "a small message and a large one"
        )
    return [(size, statistics.median(times)) for size, times in sorted(by_size.items())]
