"""Comparing what a rank ended with and what it should have ended with."""

import math
from typing import Any

import torch


def same(value: Any, expected: Any) -> bool:
    """Equal up to float32 rounding, through lists; an expected entry of None is not looked at."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(value, torch.Tensor) or value.shape != expected.shape:
            return False
        return bool(close(value, expected).all())
    if isinstance(expected, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(expected):
            return False
        return all(e is None or same(v, e) for v, e in zip(value, expected))
    if isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        return math.isclose(value, expected, rel_tol=1e-4, abs_tol=1e-5)
    return type(value) is type(expected) and bool(value == expected)


def close(value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Which numbers of two tensors of one shape are equal up to float32 rounding."""
    return torch.isclose(value.double(), expected.double(), rtol=1e-4, atol=1e-5)


def misshapen(value: Any, expected: Any) -> str:
    """The words for a value of another kind or shape than expected; empty where it fits."""
    found, due = _shape(value), _shape(expected)
    return "" if found == due else f"it has {found}, where {due} is due"


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, (int, float)):
        return "a number"
    return "nothing (None)" if value is None else f"something of type {type(value).__name__}"
