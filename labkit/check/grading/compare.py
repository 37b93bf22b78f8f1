"""Comparing what a rank ended with and what it should have ended with."""

import math
from typing import Any

import torch

from labkit.check.grading.words import Mistake


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


def agree(answer: Any, due: Any) -> bool:
    """Whether an answer is the expected one: exactly, except for a float's last digits."""
    try:
        if isinstance(answer, float) and isinstance(due, (int, float)):
            return math.isclose(answer, due, rel_tol=1e-6, abs_tol=1e-9)
        return bool(answer == due)
    except Exception:  # a tensor of several numbers is neither true nor false
        return same(answer, due)


def other_kind(value: Any, expected: Any) -> Mistake | None:
    """The mistake of a value of another kind or shape than expected."""
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
    """A value in a sentence: tensors as lists, numbers with four digits."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return "[" + ", ".join(map(short, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
