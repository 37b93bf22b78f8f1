"""Exercises that need no ranks: a function of plain values, called in one other process.

The process can be ended, whatever the function does. A function that cannot be sent there is
called in this process.
"""

import contextlib
import copy
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from traceback import extract_tb
from typing import Any, NamedTuple

import cloudpickle

from labkit.comm.comm import Comm
from labkit.comm.source_lines import is_internal, readable
from labkit.errors import WorkerError
from workbook.exercises.grader.compare import agree, plain, short
from workbook.exercises.grader.exercise import Found, Wrong
from workbook.exercises.grader.on_ranks import in_one_process, limited_memory, story_of
from workbook.exercises.grader.report import (
    CALLS_LIBRARY,
    NOT_ATTEMPTED,
    NOT_YET,
    NOT_YOURS,
    PASSED,
    Verdict,
    told,
)
from workbook.exercises.grader.stub import about_stub, is_stub, is_untouched, raised_by_stub
from workbook.exercises.grader.watched import Watched

# All questions together take milliseconds.
TIMEOUT_S = 8.0


class Question(NamedTuple):
    """One call of the learner's function: its arguments, its name, the expected result."""

    args: tuple
    words: str
    expected: Any = None


class Asked(NamedTuple):
    """What the learner's function has answered.

    Attributes:
        answers: to the first questions, in their order.
        again: the same answers in a second call, as far as there was time for it.
        broken: why the next question has no answer, with the place of an error.
        stub: the function whose stub was reached.
        library: a function called that solves the exercise, see ``Watched``.
        changed: what a call has done to its arguments, see ``Watched``.
    """

    answers: list
    again: list
    broken: str = ""
    stub: str = ""
    library: str = ""
    changed: str = ""


def answers(
    fn: Callable,
    expected: Mapping[tuple, Any] | Sequence[tuple[tuple, Any]],
    *,
    name: str = "",
    signature: str = "",
    mistakes: Mapping[str, Callable[..., Any]] | None = None,
) -> Verdict:
    """Grade a function by what it returns, print the verdict and return it.

    Args:
        fn: the learner's function.
        expected: the arguments, a tuple -> the expected result; or a list of such pairs.
        name: the name of the exercise, by default that of the function.
        signature: the names of the arguments, in one string; a function with parameters of these
            names may have them in any order.
        mistakes: a sentence -> a function that makes this mistake. The sentence is shown if all
            answers equal those of that function.

    Returns:
        The verdict. Nothing is raised: the verdict tells every failure.
    """
    own_name = getattr(fn, "__name__", type(fn).__name__)
    names = signature.split(", ")
    if not signature:
        with contextlib.suppress(TypeError, ValueError):
            parameters = inspect.signature(fn).parameters.values()
            names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    def words(args: tuple) -> str:
        """The call as one would write it: ``bubble(num_stages=4, micro_batches=8)``."""
        named = [f"{name}={arg!r}" for name, arg in zip(names, args)]
        return f"{own_name}({', '.join(named + [repr(arg) for arg in args[len(named) :]])})"

    pairs = expected.items() if isinstance(expected, Mapping) else expected
    questions = [Question(args, words(args), wanted) for args, wanted in pairs]
    options = {"mistakes": mistakes or {}, "call": _plainly, "signature": signature}
    return ask(name or own_name, fn, questions, differs, **options)


def _plainly(fn: Callable, *args: Any) -> Any:
    return plain(fn(*args))


def differs(question: Question, answer: Any) -> Found:
    """Say what is wrong with an answer, or None if it equals the expected one."""
    if agree(answer, question.expected):
        return None
    if answer is None:
        return f"{question.words}: the function returned nothing (None): return the answer"
    wanted = short(question.expected)
    return f"{question.words} should return {wanted}, but it returned {short(answer)}"


def ask(name: str, fn: Callable, *args: Any, **options: Any) -> Verdict:
    """``verdict_of``, printed."""
    return told(name, partial(verdict_of, name, fn, *args, **options))


def verdict_of(
    name: str,
    fn: Callable,
    questions: Sequence[Question],
    problem: Callable[[Question, Any], Found],
    *,
    mistakes: Mapping[str, Callable[..., Any]] | None = None,
    call: Callable[..., Any] = lambda fn, *args: fn(*args),
    right: Callable[[list], str] = lambda answers: f"all {len(answers)} answers are right",
    signature: str = "",
    may_call: Collection[str] = (),
) -> Verdict:
    """Return the verdict on ``fn``'s answers, without printing it.

    Args:
        name: the name of the exercise.
        fn: the learner's function.
        questions: the calls to make, in this order.
        problem: (question, answer) -> what is wrong with it, or None.
        mistakes: a sentence -> function that makes this mistake; the first whose answers all
            equal the learner's explains the first wrong answer.
        call: how the function is called: (fn, arguments) -> its answer, or a ``Wrong``.
        right: the answers -> the sentence to show if none is wrong.
        signature: the names of the arguments with which ``call`` calls the function.
        may_call: as in ``Watched``.
    """
    if not callable(fn):
        return Verdict(name, NOT_YET, notes=[f"expected a function, got {type(fn).__name__}"])
    if is_untouched(fn):
        return Verdict(name, NOT_ATTEMPTED)
    given = [(question.args, question.words) for question in questions]
    watching = fn, given, call, signature, may_call
    try:
        found = in_one_process(_answered, *watching, timeout_s=TIMEOUT_S)
    except ValueError:  # the function cannot travel, or this process may not start others
        found = _answered(None, *watching)
    except WorkerError as error:
        story = story_of(error).replace("rank 0", "the function")
        found = Asked([], [], f"one of {len(given)} calls: {story}")
    if is_stub(fn, found.stub):
        return Verdict(name, NOT_ATTEMPTED)
    asked = list(zip(questions, found.answers))
    wrong = ""
    for question, answer in asked:
        one = f"{question.words}: {answer}" if isinstance(answer, Wrong) else None
        if wrong := one or problem(question, answer) or "":
            for sentence, rule in (mistakes or {}).items():
                if all(agree(one, rule(*asks.args)) for asks, one in asked):
                    wrong += f": {sentence}"
                    break
            break
    if not wrong and found.stub:
        wrong = f"{questions[len(found.answers)].words}: {about_stub(fn, found.stub)}"
    # Only this process knows the numbers of a notebook's cells.
    wrong = wrong or readable(found.broken)
    for question, first, second in zip(questions, found.answers, found.again):
        if not wrong and not agree(second, first):
            wrong = f"{question.words} returned {short(first)} the first time, "
            wrong += f"but {short(second)} the second time"
    if wrong or found.changed:
        return Verdict(name, NOT_YET, notes=[wrong or found.changed])
    if found.library:
        return Verdict(name, NOT_YOURS, notes=[CALLS_LIBRARY.format(name=found.library)])
    return Verdict(name, PASSED, notes=[right(found.answers)])


def _answered(
    comm: Comm | None,
    fn: Callable,
    given: list[tuple[tuple, str]],
    call: Callable,
    signature: str,
    may_call: Collection[str],
) -> Asked:
    """Call ``fn`` for all arguments, then once more in the opposite order."""
    watched, answers, again = Watched(fn, signature, may_call), [], []
    begin_s = time.monotonic()

    def answer(args: tuple) -> Any:
        """The answer, or what it says of itself, if it cannot be sent back."""
        # A copy, because the function may change its arguments.
        found = call(watched, *copy.deepcopy(args))
        found = plain(found) if isinstance(found, Iterator) else found
        try:
            cloudpickle.dumps(found)
        except Exception:
            return f"{found!r:.200}"
        return found

    try:
        with limited_memory():
            for args, _ in given:
                answers.append(answer(args))
            if time.monotonic() - begin_s < TIMEOUT_S / 4:
                for args, _ in reversed(given):
                    again.insert(0, answer(args))
    except (Exception, SystemExit) as error:
        place = given[len(answers) if len(answers) < len(given) else -1 - len(again)][1]
        text = f"{place}: the function raised {type(error).__name__}: {error}".removesuffix(": ")
        frames = [f for f in extract_tb(error.__traceback__) if not is_internal(f.filename)]
        if frames:
            text += f'\n  at "{frames[-1].filename}", line {frames[-1].lineno}'
        return Asked(answers, [], text, raised_by_stub(error))
    return Asked(answers, again, library=watched.library, changed=watched.changed)
