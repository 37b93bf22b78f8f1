"""Compare a result with the expected one: right answers in other clothes count.

``plain`` takes the clothes off: a numpy array becomes a tensor, a tuple or a generator a list, any
mapping a dict, a tensor of no dimension a number. Then numbers are compared up to the rounding of
float32.
"""

import math
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from decimal import Decimal
from fractions import Fraction
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

_EPS = torch.finfo(torch.float32).eps
# Roundings of a number that was computed in a few operations.
_FEW = 16
# Entries of a list in a sentence.
_MOST_SHOWN = 6
# An endless generator must not hang the check.
MOST_ENTRIES = 100_000
_IN_ORDER = (list, tuple, range, deque, KeysView, ValuesView, ItemsView, Iterator)


def plain(value: Any) -> Any:
    """``value`` as a tensor, number, list or whatever else it is, also inside."""
    if isinstance(value, np.ndarray):
        is_number = value.dtype.kind in "biuf"
        value = torch.from_numpy(value.copy()) if is_number else value.tolist()
    if isinstance(value, Tensor):
        return value.item() if value.dim() == 0 else value.detach()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (Fraction, Decimal)):
        return int(value) if value == int(value) else float(value)
    if isinstance(value, _IN_ORDER):
        return [plain(entry) for entry in islice(value, MOST_ENTRIES)]
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return value


def fit(value: Any, expected: Any) -> Any:
    """``value`` made plain, and as a tensor, list or number if ``expected`` is one."""
    value = plain(value)
    if isinstance(expected, Tensor) and isinstance(value, list):
        if all(isinstance(row, (Tensor, int, float)) for row in value):
            rows = [torch.as_tensor(row).double() for row in value]
            if {(len(value), *row.shape) for row in rows} == {tuple(expected.shape)}:
                return torch.stack(rows)
    elif isinstance(expected, list) and isinstance(value, Tensor):
        return list(map(plain, value))
    elif isinstance(expected, (int, float)) and isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value


def agree(
    value: Any, expected: Any, summands: Sequence[Tensor] = (), roundings: int = _FEW
) -> bool:
    """Tell if two values, also in lists, are equal up to the rounding of float32.

    ``summands``: tensors of which the expected one may be a sum, see ``close``. Without any, so
    many ``roundings`` of the largest element may lie between the two.
    """
    expected = plain(expected)
    value = fit(value, expected)
    if isinstance(expected, Tensor):
        if not isinstance(value, Tensor) or value.shape != expected.shape:
            return False
        return bool(close(value, expected, summands, roundings).all())
    if isinstance(expected, list):
        if not isinstance(value, list) or len(value) != len(expected):
            return False
        return all(map(agree, value, expected, repeat(summands), repeat(roundings)))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            return False
        return all(agree(value[key], expected[key], summands, roundings) for key in expected)
    if isinstance(expected, (int, float)):
        if not isinstance(value, (int, float)):
            return False
        if isinstance(value, int) and isinstance(expected, int):
            return value == expected
        added = [summand for summand in summands if summand.dim() == 0]
        if added:
            numbers = torch.tensor([value, expected], dtype=torch.float64)
            return bool(close(numbers[0], numbers[1], added))
        return math.isclose(value, expected, rel_tol=roundings * _EPS, abs_tol=1e-9)
    return type(value) is type(expected) and bool(value == expected)


def close(
    value: Tensor, expected: Tensor, summands: Sequence[Tensor] = (), roundings: int = _FEW
) -> Tensor:
    """Compare two tensors of one shape by element: equal up to the rounding of float32, or not.

    A sum of n numbers may be off by n roundings of the sum of their magnitudes (Higham, Accuracy
    and Stability of Numerical Algorithms, section 4.2). The ``summands`` of the same shape are
    the numbers that were added; without any, the largest expected element stands for them.
    """
    value = value.cpu().double()
    expected = expected.cpu().double()
    magnitude = expected.abs().nan_to_num(posinf=0.0)
    added = [s.double().abs() for s in summands if s.shape == value.shape]
    if added:
        may_differ = 4 * magnitude + len(added) * torch.stack(added).nan_to_num(posinf=0.0).sum(0)
    elif magnitude.numel() > 0:
        may_differ = roundings * (magnitude + magnitude.max())
    else:
        may_differ = magnitude
    alike = (value == expected) | (value.isnan() & expected.isnan())
    return alike | ((value - expected).abs() <= _EPS * may_differ)


def other_kind(value: Any, expected: Any) -> str | None:
    """Say so if the value has another kind or shape than expected."""
    expected = plain(expected)
    given = plain(value)
    value = fit(value, expected)
    expected_kind = kind_of(expected)
    if kind_of(value) == expected_kind:
        return None
    if isinstance(value, list) and isinstance(expected, list):
        leaves = _leaves(value) + _leaves(expected)
        few = len(leaves) <= 4 * _MOST_SHOWN
        if few and all(isinstance(leaf, (int, float, str)) for leaf in leaves):
            return f"it is {beside(value, expected)}"
    return f"it is {kind_of(given)}, expected {expected_kind}"


def _leaves(value: Any) -> list:
    """The entries of a list, and of the lists in it."""
    if not isinstance(value, list):
        return [value]
    leaves = []
    for entry in value:
        leaves += _leaves(entry)
    return leaves


def sorted_inside(value: Any) -> str:
    """The value in words, with the entries of lists in one order, also inside."""
    if isinstance(value, Tensor):
        return repr(value.tolist())
    if isinstance(value, list):
        return f"[{', '.join(sorted(map(sorted_inside, value)))}]"
    if isinstance(value, dict):
        return repr({key: sorted_inside(value[key]) for key in sorted(value, key=repr)})
    return repr(value)


def kind_of(value: Any) -> str:
    """``a tensor [3, 2]``, ``a number``, ``nothing (None)`` ..."""
    if isinstance(value, dict):
        return f"a dict of {', '.join(sorted(map(repr, value))) or 'nothing'}"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, (int, float)):
        return "a number"
    if value is None:
        return "nothing (None)"
    return f"something of type {type(value).__name__}"


def short(value: Any, digits: int = 4) -> str:
    """Format a value for a sentence: tensors as lists, floats with few digits, not too long."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list):
        entries = [short(entry, digits) for entry in value[:_MOST_SHOWN]]
        if len(value) > _MOST_SHOWN:
            entries.append("...")
        return f"[{', '.join(entries)}]"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return f"{value!r:.80}"


def beside(value: Any, expected: Any) -> str:
    """``1.2, expected 1.3``, with as many digits as it takes to see a difference."""
    for digits in (4, 8, 17):
        if short(value, digits) != short(expected, digits):
            return f"{short(value, digits)}, expected {short(expected, digits)}"
    return f"{short(value)}, expected {short(expected)}"
