"""Exercises that need no ranks: a function of plain values, called in this process."""

from collections.abc import Callable, Mapping
from typing import Any

from labkit.checks.report import NOT_ATTEMPTED, NOT_YET, PASSED, Verdict, no_function, told


def answers(fn: Callable, expected: Mapping[tuple, Any]) -> Verdict:
    """Grade a function by what it returns, print how it went, and return the same as an object.

    Args:
        fn: the learner's function.
        expected: the arguments -> what it must return for them.

    Raises nothing: whatever happens is told in the verdict.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    return told(name, lambda: _answered(fn, name, expected))


def _answered(fn: Callable, name: str, expected: Mapping[tuple, Any]) -> Verdict:
    if not callable(fn):
        return Verdict(name, NOT_YET, notes=[no_function(fn)])
    for args, due in expected.items():
        call = f"{name}({', '.join(map(repr, args))})"
        try:
            answer = fn(*args)
        except NotImplementedError:
            return Verdict(name, NOT_ATTEMPTED)
        except Exception as error:
            note = f"{call} raised {type(error).__name__}: {error}"
            return Verdict(name, NOT_YET, notes=[note])
        if answer != due:
            return Verdict(name, NOT_YET, notes=[f"{call} is {due!r}, and yours says {answer!r}"])
    return Verdict(name, PASSED, notes=[f"all {len(expected)} answers are right"])
