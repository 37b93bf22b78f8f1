"""Checking what a user gives, numbers and names, and formatting numbers with units for display."""

import argparse
import difflib
import html
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from reprlib import repr as shortened
from typing import Any

# Counts fit in 32 bits, so that bytes, a multiple of a count, fit in PyTorch's 64 bits.
MOST = 2**31 - 1
MOST_RANKS = 4096
# Eleven days; poll(2) can wait for at most 24 days.
MOST_SECONDS = 1e6

_BYTES_IN = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse`` for argparse: its error's message is shown, not only the function's name."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple]:
    """The same for a list with commas."""
    return typed(lambda text: tuple(parse(word.strip()) for word in text.split(",")))


def parse_names(text: str | None) -> tuple[str, ...]:
    """``"0, 1.conv1"`` is ("0", "1.conv1"); no text is ()."""
    if not text:
        return ()
    return tuple(word.strip() for word in text.split(","))


def parse_devices(devices: str | Sequence[Any]) -> tuple[str, ...]:
    """``"cpu,cuda:1"``, or a sequence of names or of ``torch.device``, is ("cpu", "cuda:1")."""
    names = parse_names(join_names(devices))
    for name in names or ("",):
        if not re.fullmatch(r"cpu|cuda:(0|[1-9][0-9]{0,3})", name):
            raise ValueError(
                f"devices must be cpu or cuda:NUMBER, separated by commas, got {shortened(name)} "
                f"in {shortened(devices)}"
            )
    return names


def join_names(value: Any) -> str:
    """``["cpu", "cuda:1"]`` is "cpu,cuda:1"; a text stays as it is."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def parse_bytes(text: str) -> int:
    """``"4KiB"`` is 4096; ValueError for an unknown unit (KB is not KiB)."""
    match = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", text.lower())
    if not match or match[2] not in _BYTES_IN:
        raise ValueError(
            f"size {shortened(text)} is not known: give bytes, or KiB, MiB, GiB as in 4KiB"
        )
    return int(match[1]) * _BYTES_IN[match[2]]


def closest(name: object, known: Iterable[str]) -> str:
    """`` (did you mean 'batch_size'?)`` for ``bach_size``; empty if no known name is similar."""
    for match in difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.7):
        return f" (did you mean {match!r}?)"
    return ""


def check_choice(kind: str, value: object, known: Collection[str]) -> None:
    """ValueError, with the known values, for a value that is not in ``known``."""
    # In a list: a look-up in a dict would fail for values that are not hashable.
    if value not in list(known):
        hint = closest(value, known)
        raise ValueError(f"unknown {kind} {value!r}{hint}: choose one of {', '.join(known)}")


def check_integer(name: str, value: Any, least: int = 1, most: int = MOST) -> None:
    """ValueError, with the limit, for what is not an integer from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer from {least} up, got {shortened(value)}")
    _check_most(name, value, most)


def check_number(name: str, value: Any, most: float) -> None:
    """ValueError, with the limit, for what is not a number from 0 to ``most``, or NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{name} must be a number from 0 up, got {shortened(value)}")
    _check_most(name, value, most)


def check_above_zero(name: str, value: Any, most: float) -> None:
    """ValueError, with the limit, for what is not a number above 0, up to ``most``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name} must be a number above 0, got {shortened(value)}")
    _check_most(name, value, most)


def _check_most(name: str, value: float, most: float) -> None:
    if value > most:
        raise ValueError(f"{name} must be at most {most:,.10g}, got {shortened(value)}")


_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def format_bytes(num_bytes: float) -> str:
    """``format_bytes(1536)`` is ``1.5 KiB``."""
    scale, unit = byte_unit(num_bytes)
    return f"{format_number(num_bytes / scale)} {unit}"


def format_seconds(seconds: float) -> str:
    """``format_seconds(0.0123)`` is ``12.3 ms``; two minutes and more read ``2.08 min``."""
    if abs(seconds) >= 119.5:
        return f"{format_number(seconds / 60)} min"
    scale, unit = second_unit(seconds)
    return f"{format_number(seconds / scale)} {unit}"


def format_value(value: float, unit: str) -> str:
    """Format by unit: ``bytes`` and ``s`` are scaled, others (``messages``) stay as they are."""
    if unit == "bytes":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    return f"{format_number(value)} {unit}".rstrip()


def format_count(count: int, noun: str) -> str:
    """``format_count(2, "rank")`` is ``2 ranks``, ``format_count(1, "rank")`` is ``1 rank``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}es" if noun.endswith(("tch", "ss")) else f"{count} {noun}s"


def format_number(value: float) -> str:
    """Three significant digits; no fraction for 100 and more: ``0.123``, ``12,345``."""
    return f"{value:.3g}" if abs(value) < 99.95 else f"{value:,.0f}"


def byte_unit(num_bytes: float) -> tuple[float, str]:
    """The unit in which to show ``num_bytes``: (its size in bytes, its name)."""
    size = abs(num_bytes)
    scale = 1.0
    for unit in _BYTE_UNITS[:-1]:
        # A number that would be printed as 1,024 is shown in the next unit.
        if not size / scale >= 1023.5:
            return scale, unit
        scale *= 1024
    return scale, _BYTE_UNITS[-1]


def second_unit(seconds: float) -> tuple[float, str]:
    """The unit in which to show ``seconds``: (its length in seconds, its name)."""
    size = abs(seconds)
    for scale, unit in _SECOND_UNITS:
        if size >= 0.9995 * scale:
            return scale, unit
    if size == 0:
        return 1.0, "s"
    return _SECOND_UNITS[-1]


def text_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table as text, the cells of a column equally wide."""
    table = [list(heads), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for row in table:
        cells = map(str.ljust, row, widths)
        lines.append("   ".join(cells).rstrip())
    return "\n".join(lines)


def html_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table as HTML; the first cell of each row is its head."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in heads)
    body = ""
    for name, *cells in rows:
        body += f'<tr><th scope="row" style="min-width: 9em">{html.escape(name)}</th>'
        for cell in cells:
            text = html.escape(cell).replace(" (", "<br>(")
            body += f'<td style="white-space: nowrap">{text}</td>'
        body += "</tr>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div style="overflow-x: auto">{table}</div>'


def as_repeats(measured: float | Iterable[float]) -> list[float]:
    """A measurement as the list of its repeats; ValueError for none, or what is no number."""
    is_list = isinstance(measured, Iterable) and not isinstance(measured, str)
    repeats = measured if is_list else [measured]
    try:
        numbers = [float(value) for value in repeats]
    except (TypeError, ValueError):
        numbers = []
    if not numbers:
        raise ValueError(f"a number, or a list of repeats, is needed, got {measured!r}")
    return numbers
