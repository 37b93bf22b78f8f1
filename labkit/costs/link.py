"""The alpha-beta model of a link, and how it is fitted to measured messages.

Symbols: alpha seconds a message takes however short it is, beta seconds per byte on the wire,
gamma seconds to add one byte.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What a message costs between two ranks: alpha + beta x bytes, and gamma a byte to add it.

    Attributes:
        alpha_s: seconds a message takes however short it is (latency, start-up).
        beta_s_per_byte: seconds per byte on the wire; 1 / beta is the bandwidth.
        gamma_s_per_byte: seconds to combine one received byte with one's own.

    The model leaves out that messages share a memory bus, a network card or a core: with more
    ranks than cores a collective takes longer than it says. Source: Hockney, "The communication
    challenge for MPP" (1994), for alpha and beta; Thakur, Rabenseifner and Gropp, "Optimization
    of collective communication operations in MPICH" (2005), section 3, for all three.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0

    def __post_init__(self):
        for name in ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: a cost is a finite number, 0 or more")

    def message_seconds(self, num_bytes: float) -> float:
        """Seconds that one message of ``num_bytes`` takes."""
        return self.alpha_s + self.beta_s_per_byte * num_bytes


def fit_link(
    sizes_bytes: Sequence[float], seconds: Sequence[float], gamma_s_per_byte: float = 0.0
) -> Link:
    """The alpha and beta that explain measured messages best: seconds = alpha + beta x bytes.

    Least squares of the *relative* errors, or the largest sizes alone would decide and alpha be
    lost in their noise. Where a repeat is disturbed by another program it is always too slow, so
    of several measurements of one size the median counts. Neither can be negative: if the best
    line has a negative alpha (or beta), it is 0 and the other is fitted alone.

    Args:
        sizes_bytes: size of each measured message; at least two different ones.
        seconds: what each took, above 0.
        gamma_s_per_byte: measured apart, since no message adds; passed on to the Link.

    Raises:
        ValueError: the lists differ in length, hold fewer than two sizes, or a value that is no
            measurement.
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


def _medians(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, float]]:
    """(size, median seconds) by size; checks what ``fit_link`` was given."""
    if len(sizes_bytes) != len(seconds):
        raise ValueError(f"{len(sizes_bytes)} sizes and {len(seconds)} times do not pair up")
    by_size: dict[float, list[float]] = {}
    for size, time_s in zip(sizes_bytes, seconds):
        if not (math.isfinite(size) and size >= 0 and math.isfinite(time_s) and time_s > 0):
            raise ValueError(
                f"{size} bytes in {time_s} s is no measurement: give sizes from 0 up "
                "and seconds above 0"
            )
        by_size.setdefault(size, []).append(time_s)
    if len(by_size) < 2:
        raise ValueError(
            f"a line needs two different sizes, got {sorted(by_size)}: measure "
            "a small message and a large one"
        )
    return [(size, statistics.median(times)) for size, times in sorted(by_size.items())]
