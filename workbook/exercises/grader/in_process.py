"""Exercises that need no ranks: a function of plain values, asked one question after another.

The questions are the cases of a run of one rank: a process that can be ended, whatever the
function does.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from workbook.exercises.grader.compare import agree, beside
from workbook.exercises.grader.exercise import Exercise, Found, Wrong
from workbook.exercises.grader.grader import grade
from workbook.exercises.grader.report import Verdict


class Question(NamedTuple):
    """One call of the learner's function: its arguments, its name, the expected result."""

    args: tuple
    words: str
    expected: Any = None


Grades = Callable[[Callable], Verdict]


def answers(
    fn: Callable,
    expected: Iterable[tuple[tuple, Any]],
    *,
    name: str,
    signature: str,
    mistakes: Mapping[str, Callable[..., Any]] | None = None,
) -> Verdict:
    """Grade a function by pairs of its arguments, a tuple, and the expected result."""
    own_name = getattr(fn, "__name__", type(fn).__name__)
    names = signature.split(", ")
    # As one would write it: bubble(num_stages=4, micro_batches=8).
    questions = [
        Question(args, f"{own_name}({_written(names, args)})", result) for args, result in expected
    ]
    return ask(name, fn, questions, differs, mistakes=mistakes, signature=signature)


def _written(names: Iterable[str], args: tuple) -> str:
    return ", ".join(map("{}={!r}".format, names, args))


def differs(question: Question, answer: Any) -> Found:
    """Say what is wrong with an answer, or None if it equals the expected one."""
    if agree(answer, question.expected):
        return None
    if answer is None:
        return f"{question.words}: the function returned nothing (None): return the answer"
    return f"{question.words} returned {beside(answer, question.expected)}"


def judged(
    signature: str, *cases: tuple, may_call: Collection[str] = ()
) -> Callable[[Callable], Grades]:
    """Make the check of an exercise, with its name, from its judge, ``judge(fn, *case)``.

    The judge calls the learner's function with the arguments of ``signature``, and returns a
    ``Wrong``, or None if nothing is wrong. It is asked for each case, in another process.
    """

    def check_of(judge: Callable[..., Wrong | None]) -> Grades:
        _, *names = inspect.signature(judge).parameters
        words = [f"with {_written(names, case)}" if case else "here" for case in cases]
        questions = list(map(Question, cases, words))
        options = {"call": judge, "signature": signature, "may_call": may_call}
        return _check(judge, lambda name, fn: ask(name, fn, questions, differs, **options))

    return check_of


def solved(
    *cases: tuple, mistakes: Mapping[str, Callable[..., Any]] | None = None
) -> Callable[[Callable], Grades]:
    """Make the check of an exercise, with its name, from its solution: ``answers`` to the cases.

    The functions in ``mistakes`` get the solution, too, before the arguments of a case.
    """

    def check_of(solution: Callable) -> Grades:
        rules = {words: partial(rule, solution) for words, rule in (mistakes or {}).items()}
        names = ", ".join(inspect.signature(solution).parameters)
        options: dict[str, Any] = {"signature": names, "mistakes": rules}
        expected = [(case, solution(*case)) for case in cases]
        return _check(solution, lambda name, fn: answers(fn, expected, name=name, **options))

    return check_of


def _check(of: Callable, grade: Callable[[str, Callable], Verdict]) -> Grades:
    check = partial(grade, f"{of.__module__.rpartition('.')[2]}.{of.__name__}")
    check.__doc__ = of.__doc__
    return check


def ask(
    name: str,
    fn: Callable,
    questions: Sequence[Question],
    problem: Callable[[Question, Any], Found],
    *,
    mistakes: Mapping[str, Callable[..., Any]] | None = None,
    call: Callable[..., Any] = lambda fn, *args: fn(*args),
    signature: str = "",
    may_call: Collection[str] = (),
) -> Verdict:
    """Ask ``fn`` each question twice, print the verdict on its answers and return it.

    ``problem(question, answer)`` says what is wrong, or None; ``call(fn, *args)`` makes a call,
    and may return a ``Wrong``. A mistake gets a question's arguments.
    """
    exercise = Exercise(
        name,
        # A copy, because the function may change its arguments.
        inputs=lambda rank, case: copy.deepcopy(questions[case.size].args),
        signature=signature,
        written=None,
        mistakes={
            words: lambda rank, case, rule=rule: rule(*questions[case.size].args)
            for words, rule in (mistakes or {}).items()
        },
        judge=lambda case, values: problem(questions[case.size], values[0]),
        call=lambda fn, comm, *args: call(fn, *args),
        sizes=tuple(range(len(questions))),
        nouns=("", ""),
        special=lambda case: questions[case.size].words,
        may_call=frozenset(may_call),
    )
    return grade(fn, exercise, (1,))
