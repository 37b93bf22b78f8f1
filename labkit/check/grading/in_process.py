"""Exercises that need no ranks: a function of plain values, called in this process."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from traceback import extract_tb
from typing import Any, NamedTuple

from labkit.check.grading.compare import agree
from labkit.check.grading.report import NOT_ATTEMPTED, NOT_YET, PASSED, STUB, Verdict, told
from labkit.check.grading.words import Found, Mistake, named


class Question(NamedTuple):
    """One call of the learner's function: its arguments, and how a sentence names the call."""

    args: tuple
    words: str
    due: Any = None


class Wrong(Exception):
    """Raised by a ``call`` whose result cannot be judged any further: carries the mistake."""

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
    """Grade a function by what it returns, print how it went, and return the same as an object.

    Args:
        fn: the learner's function.
        expected: the arguments -> what it must return for them; or pairs of the two.
        name: of the exercise, the function's own by default.
        mistakes: a mistake's id (or a page's own sentence) -> a function that makes this mistake.
            It is told where all answers are those of that function.
        kind: ``list`` or ``bool``, where what counts as one is as good.

    Raises nothing: whatever happens is told in the verdict.
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
    """What is wrong with an answer that has to be ``question.due``."""
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
    """The verdict on ``fn``'s answers, without printing it.

    Args:
        questions: the calls to make, in this order.
        problem: (question, answer) -> what is wrong with it, or None.
        mistakes: (id, function that makes this mistake); the first one that gives all of the
            learner's answers is told with the first wrong answer.
        call: how the function is called: (fn, arguments) -> its answer.
        right: the answers -> the sentence for the case that none is wrong.
    """
    if not callable(fn):
        return Verdict(name, NOT_YET, notes=[Mistake("fn.missing", kind=type(fn).__name__)])
    answers, broken = [], None
    for question in questions:
        try:
            # A copy: an answer may change what it is given.
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
    """Whether the learner has not begun: the stub's own line raised this."""
    last_line = extract_tb(error.__traceback__)[-1].line or ""
    return isinstance(error, NotImplementedError) and STUB in last_line
