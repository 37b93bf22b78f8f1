"""Numbers for people: bytes and seconds in readable units, a measurement as its repeats.

Three significant digits everywhere: a course's measurements are not better than that. Bytes are
counted in KiB = 1024 bytes, as memory and messages are.
"""

from collections.abc import Iterable

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def format_bytes(num_bytes: float) -> str:
    """``format_bytes(1536)`` is ``1.5 KiB``."""
    scale, unit = byte_unit(num_bytes)
    return f"{format_number(num_bytes / scale)} {unit}"


def format_seconds(seconds: float) -> str:
    """``format_seconds(0.0123)`` is ``12.3 ms``; two minutes and more read ``2 min 5 s``."""
    whole = round(abs(seconds)) if abs(seconds) < float("inf") else 0
    sign = "-" if seconds < 0 else ""
    if whole >= 7200:
        return f"{sign}{whole // 3600} h {whole % 3600 // 60} min"
    if whole >= 120:
        return f"{sign}{whole // 60} min {whole % 60} s"
    scale, unit = second_unit(seconds)
    return f"{format_number(seconds / scale)} {unit}"


def format_value(value: float, unit: str) -> str:
    """Format by unit: ``bytes`` and ``s`` are scaled, any other (``messages``) is as it is."""
    if unit == "bytes":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    return f"{format_number(value)} {unit}".rstrip()


def format_count(count: int, noun: str) -> str:
    """``format_count(2, "rank")`` is ``2 ranks``, of 1 it is ``1 rank``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def format_number(value: float) -> str:
    """Three significant digits, whole above 100, thousands with commas: ``0.123``, ``12,345``."""
    if abs(value) < 99.95:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def byte_unit(num_bytes: float) -> tuple[float, str]:
    """The unit in which ``num_bytes`` reads well: (bytes in it, its name)."""
    scale, size = 1.0, abs(num_bytes)
    for unit in _BYTE_UNITS[:-1]:
        # What would be printed as 1,024 belongs to the next unit.
        if not size / scale >= 1023.5:
            return scale, unit
        scale *= 1024
    return scale, _BYTE_UNITS[-1]


def second_unit(seconds: float) -> tuple[float, str]:
    """The unit in which ``seconds`` reads well: (seconds in it, its name)."""
    size = abs(seconds)
    for scale, unit in _SECOND_UNITS:
        if size >= 0.9995 * scale:
            return scale, unit
    return (1.0, "s") if size == 0 else _SECOND_UNITS[-1]


def as_repeats(measured: float | Iterable[float]) -> list[float]:
    """A measurement as the list of its repeats: a single number is one repeat.

    Raises:
        ValueError: no repeats, or something that is not a number.
    """
    if isinstance(measured, str):
        raise ValueError(f"a number is needed, got {measured!r}: give it without its unit")
    values = list(measured) if isinstance(measured, Iterable) else [measured]
    if not values:
        raise ValueError("a measurement without repeats: measure at least once")
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        raise ValueError(f"a number (or a list of repeats) is needed, got {measured!r}") from None
