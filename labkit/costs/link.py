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

import numpy as np

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
    if len(sizes_bytes) != len(seconds):
        counts = format_count(len(sizes_bytes), "size"), format_count(len(seconds), "time")
        raise ValueError(f"{' and '.join(counts)}: give one time per size")
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
    sizes = np.array(list(by_size))
    medians = np.array([statistics.median(times) for times in by_size.values()])
    beta, alpha = np.polyfit(sizes, medians, 1, w=1 / medians)
    if beta < 0:
        alpha, beta = np.average(medians, weights=medians**-2), 0.0
    elif alpha < 0:
        alpha, beta = 0.0, np.sum(sizes / medians) / np.sum((sizes / medians) ** 2)
    return Link(float(alpha), float(beta), gamma_s_per_byte)


def _rate(seconds_per_byte: float) -> str:
    if not seconds_per_byte:
        return "bytes at no cost"
    per_s = 1 / seconds_per_byte
    scale, unit = (1e9, "GB/s") if per_s >= 0.9995e9 else (1e6, "MB/s")
    return f"{format_number(per_s / scale)} {unit}"
