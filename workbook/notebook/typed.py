"""Numbers as people type them: ``1.5 ms``, ``1,5``, ``2e6``, ``10^6``, ``3 MiB``, ``12 %``."""

import math
import re
from reprlib import repr as shortened

_NAMES = {
    ("time", 3600.0): "h hour hours",
    ("time", 60.0): "min minute minutes",
    ("time", 1.0): "s sec second seconds",
    ("time", 1e-3): "ms msec millisecond milliseconds",
    ("time", 1e-6): "µs us usec microsecond microseconds",
    ("time", 1e-9): "ns nsec nanosecond nanoseconds",
    ("size", 1.0): "b byte bytes",
    ("size", 2.0**10): "kib",
    ("size", 2.0**20): "mib",
    ("size", 2.0**30): "gib",
    ("size", 2.0**40): "tib",
    ("size", 1e3): "kb",
    ("size", 1e6): "mb",
    ("size", 1e9): "gb",
    ("size", 1e12): "tb",
    ("size", 1 / 8): "bit bits",
    ("size", 1e3 / 8): "kbit",
    ("size", 1e6 / 8): "mbit",
    ("size", 1e9 / 8): "gbit",
    ("ratio", 1.0): "times time x × ratio fraction",
    ("ratio", 0.01): "% percent",
}
# casefold, because µ has two code points, which it makes one.
_KNOWN = {word.casefold(): unit for unit, words in _NAMES.items() for word in words.split()}
_EXAMPLES = {"time": "1.5 ms", "size": "3 MiB", "ratio": "1.5, or 150 %"}

# A space, an apostrophe or an underscore may stand between groups of three digits.
_PLAIN = r"(?:[0-9]{1,3}(?:[ '’_][0-9]{3})+(?![0-9])(?:[.,][0-9]+)?|[.,]?[0-9][0-9.,]*)"
_POWER = r"(?:\^|\*\*)\s*(-?[0-9]{1,4})"
_FACTOR = re.compile(rf"([-+]?)\s*({_PLAIN})(e[-+]?[0-9]{{1,4}})?\s*(?:{_POWER})?", re.IGNORECASE)
_JOINED = re.compile(r"\s*([*x×·/])\s*(?=[-+]?\s*[.,]?[0-9])", re.I)


def parse_typed(text: str, unit: str) -> float:
    """The number in ``unit`` that was typed, with any unit of the same kind or with none.

    ``parse_typed("1.5 ms", "s")`` is 0.0015. A comma is a decimal comma or groups thousands;
    ``1,500``, which may be either, is refused.

    Raises:
        ValueError: no number, or a unit of another kind; the message says what to type.
    """
    cleaned = re.sub(r"\s+", " ", text.replace("−", "-")).strip().removeprefix("≈")
    try:
        number, rest = _leading_number(cleaned.removeprefix("~").strip())
    except OverflowError:
        number, rest = math.inf, ""
    if not math.isfinite(number):
        raise ValueError(f"{shortened(text)} is too large a number")
    number *= scale_between(rest, unit) if rest else 1.0
    return number


def scale_between(given: str, unit: str) -> float:
    """How many of ``unit`` one ``given`` is: 0.001 for ``ms`` and ``s``.

    Raises:
        ValueError: they measure different things.
    """
    (kind, scale), (wanted, wanted_scale) = _kind(given), _kind(unit)
    if kind != wanted:
        example = _EXAMPLES.get(wanted, f"12 {unit}".strip())
        raise ValueError(
            f"{shortened(given)} is not a unit here: give it in {unit}, as in {example}"
        )
    return scale / wanted_scale


def _kind(unit: str) -> tuple[str, float]:
    """What a unit measures, and its size; an unknown word measures only itself."""
    if "/" in unit:
        above, below = unit.split("/", 1)
        (kind, scale), (per, per_scale) = _kind(above), _kind(below)
        return f"{kind}/{per}", scale / per_scale
    word = unit.strip().casefold()
    if not word:
        return "ratio", 1.0
    # Without the ending of a plural: 1 message, 2 messages.
    return _KNOWN.get(word, (word.removesuffix("s").removesuffix("e"), 1.0))


def _leading_number(text: str) -> tuple[float, str]:
    """The product at the start of ``text``, and what follows it."""
    value, joint, place = 1.0, "*", 0
    while True:
        match = _FACTOR.match(text, place)
        if not match:
            raise ValueError(f"{shortened(text)} is not a number: type one such as 1.5 or 2e6")
        factor = _factor(*match.groups())
        if joint == "/" and factor == 0:
            raise ValueError(f"{shortened(text)} divides by 0")
        value = value / factor if joint == "/" else value * factor
        place = match.end()
        joined = _JOINED.match(text, place)
        if not joined:
            break
        joint, place = joined[1], joined.end()
    rest = text[place:].strip()
    if rest[:1].isdigit():
        raise ValueError(f"{shortened(text)} is not one number: type one such as 1.5 or 2e6")
    return value, rest


def _factor(sign: str, digits: str, exponent: str | None, power: str | None) -> float:
    value = float(f"{_with_a_point(digits)}{exponent or ''}")
    if power is not None:
        if value == 0 and power.startswith("-"):
            raise ValueError("0 has no negative powers")
        value **= int(power)
    return -value if sign == "-" else value


def _with_a_point(digits: str) -> str:
    """Digits with separators, in the way Python reads them."""
    digits = re.sub(r"[ '’_]", "", digits)
    if re.fullmatch(r"[1-9][0-9]{0,2},[0-9]{3}", digits):
        point = digits.replace(",", ".")
        raise ValueError(
            f"{digits} may be {digits.replace(',', '')} or {point}: type it without the comma"
        )
    for comma, point in ((",", "."), (".", ",")):
        grouped = rf"[0-9]{{1,3}}(\{comma}[0-9]{{3}})+(\{point}[0-9]*)?"
        if re.fullmatch(grouped, digits) and (point in digits or digits.count(comma) > 1):
            return digits.replace(comma, "").replace(point, ".")
    if digits.count(",") + digits.count(".") > 1:
        raise ValueError(f"{digits} has too many points and commas for a number")
    return digits.replace(",", ".")
