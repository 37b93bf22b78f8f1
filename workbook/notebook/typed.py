"""Numbers as people type them: ``1.5 ms``, ``1,5``, ``2e6``, ``10^6``, ``3 MiB``, ``12 %``."""

import math
import re
from reprlib import repr as shortened

_UNITS = {
    "time": "h=3600 hour=3600 min=60 minute=60 s=1 sec=1 second=1 ms=1e-3 msec=1e-3 "
    "millisecond=1e-3 µs=1e-6 us=1e-6 usec=1e-6 microsecond=1e-6 ns=1e-9 nanosecond=1e-9",
    "size": "b=1 byte=1 kib=1024 mib=1048576 gib=1073741824 tib=1099511627776 kb=1e3 mb=1e6 "
    "gb=1e9 tb=1e12 bit=0.125 kbit=125 mbit=125e3 gbit=125e6",
    "ratio": "times=1 time=1 x=1 ×=1 ratio=1 fraction=1 %=0.01 percent=0.01",
}
# casefold, because µ has two code points, which it makes one.
_KNOWN = {
    word.partition("=")[0].casefold(): (kind, float(word.partition("=")[2]))
    for kind, words in _UNITS.items()
    for word in words.split()
}
_EXAMPLES = {"time": "1.5 ms", "size": "3 MiB", "ratio": "1.5, or 150 %"}

# A space, an apostrophe or an underscore may stand between groups of three digits.
_PLAIN = r"(?:[0-9]{1,3}(?:[ '’_][0-9]{3})+(?![0-9])(?:[.,][0-9]+)?|[.,]?[0-9][0-9.,]*)"
_FACTOR = rf"[-+]?\s*{_PLAIN}(?:e[-+]?[0-9]{{1,4}})?(?:\s*\^\s*-?[0-9]{{1,4}})?"
_JOINED = r"\s*([*x×·/])\s*(?=[-+]?\s*[.,]?[0-9])"
_PRODUCT = re.compile(rf"{_FACTOR}(?:{_JOINED}{_FACTOR})*", re.IGNORECASE)


def parse_typed(text: str, unit: str) -> float:
    """The number in ``unit`` that was typed, with any unit of the same kind or with none.

    ``parse_typed("1.5 ms", "s")`` is 0.0015. A comma is a decimal comma or groups thousands;
    ``1,500``, which may be either, is refused.

    Raises:
        ValueError: no number, or a unit of another kind; the message says what to type.
    """
    cleaned = re.sub(r"\s+", " ", text.replace("−", "-").replace("**", "^")).strip(" ≈~")
    match = _PRODUCT.match(cleaned)
    rest = cleaned[match.end() :].strip() if match else ""
    if not match or rest[:1].isdigit():
        raise ValueError(f"{shortened(text)} is not one number: type one such as 1.5 or 2e6")
    try:
        first, *others = re.split(_JOINED, match[0], flags=re.IGNORECASE)
        number = _factor(first)
        for joint, factor in zip(others[::2], others[1::2]):
            number = number / _factor(factor) if joint == "/" else number * _factor(factor)
    except ZeroDivisionError:
        raise ValueError(f"{shortened(text)} divides by 0") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{shortened(text)} is too large a number")
    return number * (scale_between(rest, unit) if rest else 1.0)


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
    word = unit.strip().casefold() or "times"
    # Without the ending of a plural: 1 message, 2 messages.
    singular = word.removesuffix("s") or word
    return _KNOWN.get(word) or _KNOWN.get(singular) or (singular.removesuffix("e"), 1.0)


def _factor(text: str) -> float:
    base, _, power = text.replace(" ", "").partition("^")
    digits, e, exponent = base.casefold().partition("e")
    sign = digits[0] if digits[0] in "-+" else ""
    value = float(f"{_with_a_point(digits.removeprefix(sign))}{e}{exponent}")
    return float(f"{sign}1") * (value ** int(power) if power else value)


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
