"""Compare the result of a rank with the expected one."""

import math
from typing import Any

import torch

from labkit.check.grading.words import Mistake


def same(value: Any, expected: Any) -> bool:
    """Whether two values, or lists, are equal up to rounding; an expected None fits any entry."""
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
    """Which elements of two tensors of one shape are equal up to float32 rounding."""
    return torch.isclose(value.double(), expected.double(), rtol=1e-4, atol=1e-5)


def agree(answer: Any, due: Any) -> bool:
    """Whether an answer equals the expected one: exactly, except for the rounding of floats."""
    try:
        if isinstance(answer, float) and isinstance(due, (int, float)):
            return math.isclose(answer, due, rel_tol=1e-6, abs_tol=1e-9)
        return bool(answer == due)
    except Exception:  # a tensor of several numbers is neither true nor false
        return same(answer, due)


def other_kind(value: Any, expected: Any) -> Mistake | None:
    """Return the mistake if the value has another kind or shape than expected, else None."""
    found, due = _kind(value), _kind(expected)
    return None if found == due else Mistake("value.kind", found=found, due=due)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, (int, float)):
        return "a number"
    return "nothing (None)" if value is None else f"something of type {type(value).__name__}"


def short(value: Any) -> str:
    """Format a value for a sentence: tensors as lists, floats with four digits."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return "[" + ", ".join(map(short, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
