"""Exercises that need no ranks: a function of plain values, called for one case after another.

The cases are those of a run of one rank: a process that can be ended, whatever the function does.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from random import Random
from typing import Any

from workbook.exercises.grader.exercise import Case, Exercise, Wrong, new_seed
from workbook.exercises.grader.grader import grade
from workbook.exercises.grader.report import Verdict

Grades = Callable[[Callable], Verdict]


def judged(
    signature: str,
    *cases: tuple,
    drawn: Callable | None = None,
    in_words: Callable[..., str] | None = None,
) -> Callable[[Callable], Grades]:
    """Make the check of an exercise, with its name, from its judge, ``judge(fn, *case)``.

    The judge calls the learner's function with the arguments of ``signature``, and returns a
    ``Wrong``, or None if nothing is wrong. It is asked for each case, in another process.
    ``drawn(fn, status, world_size)`` is the verdict's own run. ``in_words(*case)`` says for a
    message what is given, by default the judge's arguments by name.
    """

    def check_of(judge: Callable[..., Wrong | None]) -> Grades:
        _, *names = inspect.signature(judge).parameters
        exercise = _exercise(
            judge,
            names,
            cases,
            signature=signature,
            in_words=in_words,
            call=lambda fn, comm, *args: judge(fn, *args),
        )

        def check(fn: Callable) -> Verdict:
            verdict = grade(fn, exercise, (1,))
            if drawn:
                verdict.run_again = partial(drawn, fn)
            return verdict

        check.__doc__ = judge.__doc__
        return check

    return check_of


def solved(
    *cases: tuple,
    more: Callable[[Random], Iterable[tuple]] = lambda random: (),
    mistakes: Mapping[str, Callable[..., Any]] | None = None,
) -> Callable[[Callable], Grades]:
    """Make the check of an exercise, with its name, from its solution.

    ``more`` draws further cases, others in each check. The functions in ``mistakes`` get the
    solution, too, before the arguments of a case.
    """

    def check_of(solution: Callable) -> Grades:
        names = list(inspect.signature(solution).parameters)

        def check(fn: Callable) -> Verdict:
            tried = (*cases, *more(Random(new_seed())))

            def result(rule: Callable[..., Any], rank: int, case: Case) -> Any:
                return rule(solution, *tried[case.size])

            exercise = _exercise(
                solution,
                names,
                tried,
                signature=", ".join(names),
                expected=lambda rank, case: solution(*tried[case.size]),
                mistakes={
                    words: partial(result, rule) for words, rule in (mistakes or {}).items()
                },
                call=lambda fn, comm, *args: fn(*args),
            )
            return grade(fn, exercise, (1,))

        check.__doc__ = solution.__doc__
        return check

    return check_of


def _exercise(
    task: Callable,
    names: list[str],
    cases: tuple,
    in_words: Callable[..., str] | None = None,
    **fields: Any,
) -> Exercise:
    """Call a function twice for each case: the second time it may have kept something."""
    if in_words is None:
        words = [", ".join(map("{}={!r}".format, names, case)) for case in cases]
    else:
        words = [in_words(*case) for case in cases]
    return Exercise(
        f"{task.__module__.rpartition('.')[2]}.{task.__name__}",
        # A copy, because the function may change its arguments.
        inputs=lambda rank, case: copy.deepcopy(cases[case.size]),
        written=None,
        parts=lambda case: {},
        sizes=tuple(range(len(cases))),
        nouns=("", ""),
        special=lambda case: words[case.size] and f"with {words[case.size]}",
        **fields,
    )
