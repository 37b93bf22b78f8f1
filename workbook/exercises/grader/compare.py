"""Compare a result with the expected one: right answers in other clothes count.

``plain`` takes the clothes off: a numpy array becomes a tensor, a tuple or a generator a list, a
tensor of no dimension a number. Then numbers are compared up to the rounding of float32.
"""

import math
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

_EPS = torch.finfo(torch.float32).eps
# Of a number that was computed in a few operations.
_FEW = 16
# An endless generator must not hang the check.
MOST_ENTRIES = 100_000
_IN_ORDER = (list, tuple, range, deque, KeysView, ValuesView, ItemsView, Iterator)


def plain(value: Any) -> Any:
    """``value`` as a tensor, number, list or whatever else it is, also inside."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value.copy()) if value.dtype.kind in "biuf" else value.tolist()
    if isinstance(value, Tensor):
        return value.item() if value.dim() == 0 else value.detach()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (Fraction, Decimal)):
        return int(value) if value == int(value) else float(value)
    if isinstance(value, _IN_ORDER):
        return [plain(entry) for entry in islice(value, MOST_ENTRIES)]
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
        return [plain(row) for row in value]
    elif isinstance(expected, (int, float)) and isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value


def agree(value: Any, expected: Any, summands: Sequence[Tensor] = ()) -> bool:
    """Whether two values, also in lists, are equal up to the rounding of float32.

    ``summands``: tensors of which the expected one may be a sum, see ``close``.
    """
    expected = plain(expected)
    value = fit(value, expected)
    if isinstance(expected, Tensor):
        if not isinstance(value, Tensor) or value.shape != expected.shape:
            return False
        return bool(close(value, expected, summands).all())
    if isinstance(expected, list):
        if not isinstance(value, list) or len(value) != len(expected):
            return False
        return all(agree(v, e, summands) for v, e in zip(value, expected))
    if isinstance(expected, (int, float)):
        if not isinstance(value, (int, float)):
            return False
        if isinstance(value, int) and isinstance(expected, int):
            return value == expected
        return math.isclose(value, expected, rel_tol=_FEW * _EPS, abs_tol=1e-9)
    return type(value) is type(expected) and bool(value == expected)


def close(value: Tensor, expected: Tensor, summands: Sequence[Tensor] = ()) -> Tensor:
    """Which elements of two tensors of one shape are equal up to the rounding of float32.

    A sum of n numbers may be off by n roundings of the sum of their magnitudes (Higham, Accuracy
    and Stability of Numerical Algorithms, section 4.2). The ``summands`` of the same shape are
    the numbers that were added; without any, the largest expected element stands for them.
    """
    value, expected = value.cpu().double(), expected.cpu().double()
    added = [s.double().abs().nan_to_num(posinf=0.0) for s in summands if s.shape == value.shape]
    size = expected.abs().nan_to_num(posinf=0.0)
    if added:
        may_differ = 4 * size + len(added) * torch.stack(added).sum(0)
    else:
        may_differ = _FEW * (size + (size.max() if size.numel() else 0.0))
    alike = (value == expected) | (value.isnan() & expected.isnan())
    return alike | ((value - expected).abs() <= _EPS * may_differ)


def other_kind(value: Any, expected: Any) -> str | None:
    """Say so if the value has another kind or shape than expected."""
    expected = plain(expected)
    found, wanted = kind_of(fit(value, expected)), kind_of(expected)
    return None if found == wanted else f"it is {found}, expected {wanted}"


def kind_of(value: Any) -> str:
    """``a tensor [3, 2]``, ``a number``, ``nothing (None)`` ..."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, (int, float)):
        return "a number"
    return "nothing (None)" if value is None else f"something of type {type(value).__name__}"


def short(value: Any, digits: int = 4) -> str:
    """Format a value for a sentence: tensors as lists, floats with few digits, not too long."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list):
        entries = [short(entry, digits) for entry in value[:6]] + ["..."] * (len(value) > 6)
        return f"[{', '.join(entries)}]"
    return f"{value:.{digits}g}" if isinstance(value, float) else f"{value!r:.80}"


def beside(found: Any, expected: Any) -> str:
    """``1.2, expected 1.3``, with as many digits as it takes to see a difference."""
    pairs = [(short(found, digits), short(expected, digits)) for digits in (4, 8, 17)]
    return "{}, expected {}".format(*next((pair for pair in pairs if len({*pair}) > 1), pairs[0]))
