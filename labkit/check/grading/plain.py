"""Exercises that need no ranks: a function of plain values, called in this process."""

from collections.abc import Callable, Mapping
from itertools import islice
from traceback import extract_tb
from typing import Any

from labkit.check.grading.compare import same
from labkit.check.grading.report import (
    NOT_ATTEMPTED,
    NOT_YET,
    PASSED,
    STUB,
    Verdict,
    no_function,
    told,
)


def answers(
    fn: Callable,
    expected: Mapping[tuple, Any],
    *,
    name: str = "",
    mistakes: Mapping[str, Callable[..., Any]] | None = None,
) -> Verdict:
    """Grade a function by what it returns, print how it went, and return the same as an object.

    Args:
        fn: the learner's function.
        expected: the arguments -> what it must return for them.
        name: of the exercise, the function's own by default.
        mistakes: sentence -> a function that makes this mistake: where the first wrong answer is
            what it returns, the sentence is told.

    Raises nothing: whatever happens is told in the verdict.
    """
    name = name or _name(fn)
    return told(name, lambda: _answered(fn, name, expected, mistakes or {}))


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _answered(
    fn: Callable,
    name: str,
    expected: Mapping[tuple, Any],
    mistakes: Mapping[str, Callable[..., Any]],
) -> Verdict:
    if not callable(fn):
        return Verdict(name, NOT_YET, notes=[no_function(fn)])
    for args, due in expected.items():
        call = f"{_name(fn)}({', '.join(map(repr, args))})"
        try:
            answer = fn(*args)
        except Exception as error:
            if from_a_stub(error):
                return Verdict(name, NOT_ATTEMPTED)
            note = f"{call} raised {type(error).__name__}: {error}"
            return Verdict(name, NOT_YET, notes=[note])
        if not _agree(answer, due):
            note = f"{call} is {due!r}, and yours says {answer!r}"
            named = (said for said, wrong in mistakes.items() if _agree(answer, wrong(*args)))
            return Verdict(name, NOT_YET, notes=[": ".join([note, *islice(named, 1)])])
    return Verdict(name, PASSED, notes=[f"all {len(expected)} answers are right"])


def from_a_stub(error: Exception) -> bool:
    """Whether the learner has not begun: the stub's own line raised this."""
    last_line = extract_tb(error.__traceback__)[-1].line or ""
    return isinstance(error, NotImplementedError) and STUB in last_line


def _agree(answer: Any, due: Any) -> bool:
    try:
        return bool(answer == due)
    except Exception:  # a tensor of several numbers is neither true nor false
        return same(answer, due)
