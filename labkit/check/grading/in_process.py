"""Exercises that need no ranks: a function of plain values, called in this process."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from traceback import extract_tb
from typing import Any, NamedTuple

from labkit.check.grading.compare import agree
from labkit.check.grading.report import NOT_ATTEMPTED, NOT_YET, PASSED, Verdict, told
from labkit.check.grading.stub import STUB
from labkit.check.grading.words import Found, Mistake, named


class Question(NamedTuple):
    """One call of the learner's function: its arguments, its name, the expected result."""

    args: tuple
    words: str
    due: Any = None


class Wrong(Exception):
    """Raised by ``call`` when an answer cannot be judged; carries the mistake."""

    def __init__(self, mistake: Mistake):
        super().__init__(str(mistake))
        self.mistake = mistake


def answers(
    fn: Callable,
    expected: Mapping[tuple, Any] | Sequence[tuple[tuple, Any]],
    *,
    name: str = "",
    mistakes: Mapping[str, Callable[..., Any]] | None = None,
    kind: Callable[[Any], Any] | None = None,
) -> Verdict:
    """Grade a function by what it returns, print the verdict and return it.

    Args:
        fn: the learner's function.
        expected: the arguments, a tuple -> the expected result; or a list of such pairs.
        name: the name of the exercise, by default that of the function.
        mistakes: a mistake's id (or a page's own sentence) -> a function that makes this mistake.
            The mistake is named if all answers equal those of that function.
        kind: ``list`` or ``bool``, to convert each answer, so that other types are accepted.

    Returns:
        The verdict. Nothing is raised: the verdict tells every failure.
    """
    own_name = getattr(fn, "__name__", type(fn).__name__)
    pairs = expected.items() if isinstance(expected, Mapping) else expected
    questions = [
        Question(args, f"{own_name}({', '.join(map(repr, args))})", due) for args, due in pairs
    ]

    def call(fn: Callable, *args: Any) -> Any:
        answer = fn(*args)
        return answer if kind is None or answer is None else kind(answer)

    name, wrong = name or own_name, (mistakes or {}).items()
    return told(name, partial(ask, name, fn, questions, differs, mistakes=wrong, call=call))


def differs(question: Question, answer: Any) -> Mistake | None:
    """Return what is wrong with an answer, or None if it equals ``question.due``."""
    if agree(answer, question.due):
        return None
    if answer is None:
        return Mistake("told.place", place=question.words, what=Mistake("answer.nothing"))
    return Mistake(
        "answer.wrong", call=question.words, due=repr(question.due), answer=repr(answer)
    )


def ask(
    name: str,
    fn: Callable,
    questions: Sequence[Question],
    problem: Callable[[Any, Any], Mistake | None],
    *,
    mistakes: Iterable[tuple[str, Callable[..., Any]]] = (),
    call: Callable[..., Any] = lambda fn, *args: fn(*args),
    right: Callable[[list], str] = lambda answers: f"all {len(answers)} answers are right",
) -> Verdict:
    """Return the verdict on ``fn``'s answers, without printing it.

    Args:
        name: the name of the exercise.
        fn: the learner's function.
        questions: the calls to make, in this order.
        problem: (question, answer) -> what is wrong with it, or None.
        mistakes: (id, function that makes this mistake); the first whose answers all equal the
            learner's explains the first wrong answer.
        call: how the function is called: (fn, arguments) -> its answer.
        right: the answers -> the sentence to show if none is wrong.
    """
    if not callable(fn):
        return Verdict(name, NOT_YET, notes=[Mistake("fn.missing", kind=type(fn).__name__)])
    answers, broken = [], None
    for question in questions:
        try:
            # A copy, because the function may change its arguments.
            answers.append(call(fn, *copy.deepcopy(question.args)))
        except Exception as error:
            if from_a_stub(error):
                return Verdict(name, NOT_ATTEMPTED)
            broken = _what_it_raised(question, error)
            break
    asked = list(zip(questions, answers))
    found = next(filter(None, (problem(*pair) for pair in asked)), None)
    if found:
        found.explain(_explanation(asked, mistakes))
    found = found or broken
    return Verdict(name, NOT_YET if found else PASSED, notes=[found or right(answers)])


def _what_it_raised(question: Question, error: Exception) -> Mistake:
    if isinstance(error, Wrong):
        return Mistake("told.place", place=question.words, what=error.mistake)
    return Mistake("answer.raised", place=question.words, error=f"{type(error).__name__}: {error}")


def _explanation(asked: list[tuple[Question, Any]], mistakes: Iterable) -> Found:
    for key, wrong in mistakes:
        if all(agree(answer, wrong(*question.args)) for question, answer in asked):
            return named(key)
    return None


def from_a_stub(error: Exception) -> bool:
    """Whether ``error`` was raised by the stub's own line: the learner has not begun."""
    last_line = extract_tb(error.__traceback__)[-1].line or ""
    return isinstance(error, NotImplementedError) and STUB in last_line
