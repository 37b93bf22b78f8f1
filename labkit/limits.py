"""Numbers that a user gives: how they are written, and how large they may be.

Everything is checked before a rank starts, in texts of the command line and in arguments alike.
"""

import re
from reprlib import repr as shortened
from typing import Any

# A count has to fit 32 bits: PyTorch counts in 64, and bytes are a multiple of a count.
MOST = 2**31 - 1
# A larger number is a slip of the finger, and would start processes until memory is full.
MOST_RANKS = 4096
# Eleven days; poll(2) waits for 24 at most.
MOST_SECONDS = 1e6
# A terabyte: more than the memory of a machine that someone learns on.
MOST_BYTES = 2**40

_WHOLE = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


def parse_whole(text: str) -> int:
    """``"12"`` is 12. ``int`` would take ``+12``, ``1_2``, and the digits of every script.

    Raises:
        ValueError: anything but the digits 0 to 9, perhaps after a minus sign.
    """
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{shortened(text)} is not a whole number")
    # Longer than the largest limit, and Python refuses to convert thousands of digits.
    return int(text) if len(text) < 40 else 10**40


def parse_number(text: str) -> float:
    """``"1.5"`` and ``"1e-3"``, as ``float`` takes them, without its ``nan``, ``inf`` and ``1_0``.

    Raises:
        ValueError: not of this form.
    """
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{shortened(text)} is not a number")
    return float(text)


def check_whole(name: str, value: Any, least: int = 1, most: int = MOST) -> None:
    """Refuse what is not an integer from ``least`` to ``most``.

    Raises:
        ValueError: the message says the limit.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number from {least}, got {shortened(value)}")
    _check_most(name, value, most)


def check_number(name: str, value: Any, least: float, most: float) -> None:
    """Refuse what is not a number from ``least`` to ``most``; NaN is not.

    Raises:
        ValueError: the message says the limit.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not value >= least:
        raise ValueError(f"{name} must be a number from {least:,.10g}, got {shortened(value)}")
    _check_most(name, value, most)


def check_above_zero(name: str, value: Any, most: float) -> None:
    """Refuse what is not a number above 0, up to ``most``.

    Raises:
        ValueError: the message says the limit.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not value > 0:
        raise ValueError(f"{name} must be a number above 0, got {shortened(value)}")
    _check_most(name, value, most)


def _check_most(name: str, value: float, most: float) -> None:
    if value > most:
        raise ValueError(f"{name} must be at most {most:,.10g}, got {shortened(value)}")


def whole_option(option: str, text: str, most: int = MOST) -> int:
    """The whole number from 1 that an option of the command line gives.

    Raises:
        ValueError: the message names the option.
    """
    try:
        value = parse_whole(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    check_whole(option, value, most=most)
    return value
