"""Numbers as people type them: ``1.5 ms``, ``1,5``, ``2e6``, ``3 * 10^6``, ``3 MiB``, ``12 %``."""

import ast
import math
import operator
import re
from collections.abc import Callable
from reprlib import repr as shortened
from typing import Any

# What a unit measures, and its size; an unknown word measures only itself.
_UNITS = {
    **{word: ("time", size) for word, size in {"h": 3600.0, "min": 60.0, "s": 1.0}.items()},
    **{word: ("time", size) for word, size in {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}.items()},
    # casefold makes this one of the two code points of µ.
    "\u03bcs": ("time", 1e-6),
    **{word: ("time", size) for word, size in {"minute": 60.0, "second": 1.0}.items()},
    **{word: ("size", 1.0) for word in ("b", "byte")},
    **{f"{prefix}b": ("size", 1e3**power) for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": ("size", 1024.0**power) for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}bit": ("size", 1e3**power / 8) for power, prefix in enumerate(["", *"kmg"])},
    **{word: ("ratio", 1.0) for word in ("time", "x", "×")},
    **{word: ("ratio", 0.01) for word in ("%", "percent")},
}
_OPERATIONS: dict[type, Callable[[float, float], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def parse_typed(text: str, unit: str) -> float:
    """The number in ``unit`` that was typed, with any unit of the same kind or with none.

    ``parse_typed("1.5 ms", "s")`` is 0.0015; ``3 * 2^20`` is calculated. One comma is a decimal
    comma, several group thousands; ``1,500``, which may be either, is refused.

    Raises:
        ValueError: no number, or a unit of another kind; the message says what to type.
    """
    cleaned = text.replace("−", "-").replace("^", "**").strip(" \u00a0~≈")
    cleaned = re.sub(r"(?<=[0-9])[\s'_](?=[0-9]{3}(?![0-9]))", "", cleaned)
    cleaned = re.sub(r"[0-9]+(?:,[0-9]{3}){2,}", lambda found: found[0].replace(",", ""), cleaned)
    if found := re.search(r"(?<![0-9])[1-9][0-9]{0,2},[0-9]{3}(?![0-9])", cleaned):
        raise ValueError(f"{found[0]} may be two numbers: type it without the comma")
    cleaned = re.sub(r"[x×·](?=\s*[0-9])", "*", cleaned.replace(",", "."))
    parts = re.fullmatch(r"(.*[0-9.)])\s*([^0-9.)]*)", cleaned)
    try:
        number = _calculated(ast.parse(parts[1], mode="eval").body) if parts else math.nan
    except (ArithmeticError, SyntaxError, ValueError, RecursionError, MemoryError):
        number = math.nan
    if parts is None or not math.isfinite(number):
        raise ValueError(f"{shortened(text)} is not one number: type one such as 1.5 or 2e6")
    (kind, size), (wanted, wanted_size) = _kind(parts[2] or unit), _kind(unit)
    if kind != wanted:
        raise ValueError(f"{shortened(parts[2])} is not a unit here: give it in {unit}")
    return number * size / wanted_size


def _calculated(node: ast.expr) -> float:
    """The value of an expression of numbers, in floats: a power of integers could take hours."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculated(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_calculated(left), _calculated(right))
            return value if isinstance(value, float) else math.nan
    raise ValueError(f"{ast.unparse(node)} is no number")


def _kind(unit: str) -> tuple[str, float]:
    if "/" in unit:
        (kind, size), (per, per_size) = map(_kind, unit.split("/", 1))
        return f"{kind}/{per}", size / per_size
    word = unit.strip().casefold() or "time"
    # 1 message, 2 messages: without the ending of the plural.
    singular = word.removesuffix("s") or word
    return _UNITS.get(word) or _UNITS.get(singular) or (singular.removesuffix("e"), 1.0)
