"""Numbers as people type them, with any unit of the same kind: ``1.5 ms``, ``2e6``, ``3 MiB``."""

import contextlib
import math
import re
from reprlib import repr as shortened

_UNITS = {
    "time": {"h": 3600.0, "min": 60.0, "s": 1.0, "second": 1.0, "ms": 1e-3, "ns": 1e-9}
    # casefold makes the second one of the two code points of µ.
    | {"us": 1e-6, "\u03bcs": 1e-6},
    "size": {"b": 1.0, "byte": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "bit": 1 / 8, "mbit": 1e6 / 8}
    | {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "gbit": 1e9 / 8},
    "ratio": {"time": 1.0, "x": 1.0, "×": 1.0, "%": 0.01},
}


def parse_typed(text: str, unit: str) -> float:
    """The number in ``unit`` that was typed, with any unit of the same kind or with none.

    ``parse_typed("1.5 ms", "s")`` is 0.0015. A comma is refused: it may mean a point or nothing.

    Raises:
        ValueError: no number, or a unit of another kind; the message says what to type.
    """
    parts = re.fullmatch(r"([-+0-9.e_]*[0-9.])\s*([^0-9.,]*)", text.strip(" \u00a0~≈").casefold())
    number = math.nan
    if parts is not None:
        with contextlib.suppress(ValueError):
            number = float(parts[1])
    if parts is None or not math.isfinite(number):
        example = "type one such as 1.5, 1000000 or 2e6"
        raise ValueError(f"{shortened(text)} is not one number: {example}")
    kind, size = _kind(parts[2] or unit)
    expected_kind, expected_size = _kind(unit)
    if kind != expected_kind:
        raise ValueError(f"{shortened(parts[2])} is not a unit here: give it in {unit}")
    return number * size / expected_size


def _kind(unit: str) -> tuple[str, float]:
    """The quantity that a unit measures, and its size; an unknown word measures only itself."""
    if "/" in unit:
        numerator, denominator = unit.split("/", 1)
        kind, size = _kind(numerator)
        per, per_size = _kind(denominator)
        return f"{kind}/{per}", size / per_size
    word = unit.strip().casefold() or "time"
    # 1 message, 2 messages, 2 batches: without the ending of the plural.
    singular = word.removesuffix("s") or word
    for kind, sizes in _UNITS.items():
        if word in sizes:
            return kind, sizes[word]
        if singular in sizes:
            return kind, sizes[singular]
    return singular.removesuffix("e"), 1.0
