"""Exercises that need no ranks: a function of plain values, called in one other process.

The process can be ended, whatever the function does: an endless loop, also inside of a function
of C, or a call of ``sys.exit``. A function that cannot be sent there is called in this process.
"""

import contextlib
import copy
import inspect
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from traceback import extract_tb
from typing import Any, NamedTuple

import cloudpickle

from labkit.comm.comm import Comm
from labkit.comm.source_lines import is_internal, readable
from labkit.errors import DeadlineError, WorkerError
from workbook.exercises.grader.compare import agree, plain, short
from workbook.exercises.grader.exercise import Found, Wrong
from workbook.exercises.grader.on_ranks import AGAIN_S, in_one_process, limited_memory, story_of
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

# All questions together take milliseconds. The process is ended a little after the function.
TIMEOUT_S = 6.0
_MORE_S = 2.0
# A function may catch the first OutOfTime, but hardly all.
_RING_AGAIN_S = 0.2
# How many questions are asked one by one, each in its own process, after a process has ended.
_ONE_BY_ONE = 12


class OutOfTime(BaseException):
    """Raised in a function that has not ended in time. No Exception, which it might catch."""


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise ``OutOfTime`` in the block, in the main thread, once ``seconds`` have passed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, _RING_AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
    broken: tuple[str, str] | None = None
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
    kind: Callable[[Any], Any] | None = None,
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
        kind: ``list`` or ``bool``, to convert each answer, so that other types are accepted.

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
    call = partial(_converted, kind)
    options = {"mistakes": mistakes or {}, "call": call, "signature": signature}
    return ask(name or own_name, fn, questions, differs, **options)


def _converted(kind: Callable[[Any], Any] | None, fn: Callable, *args: Any) -> Any:
    answer = fn(*args)
    if kind is None or answer is None:
        return answer
    try:
        return kind(answer)
    except (TypeError, ValueError, RuntimeError):
        return answer


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


Grades = Callable[[Callable], Verdict]


def judged(signature: str, *cases: tuple) -> Callable[[Callable], Grades]:
    """Make the check of an exercise, with its name, from its judge, ``judge(fn, *case)``.

    The judge calls the learner's function with the arguments of ``signature``, and returns a
    ``Wrong``, or None if nothing is wrong. It is asked for each case, in another process.
    """

    def check_of(judge: Callable[..., Wrong | None]) -> Grades:
        _, *names = inspect.signature(judge).parameters
        shown = [", ".join(map("{}={!r}".format, names, case)) for case in cases]
        words = [f"with {case}" if case else "here" for case in shown]
        questions = list(map(Question, cases, words))
        options = {"call": judge, "signature": signature}
        return _check(judge, lambda name, fn: ask(name, fn, questions, differs, **options))

    return check_of


def solved(
    *cases: tuple, mistakes: Mapping[str, Callable[..., Any]], kind: Callable | None = None
) -> Callable[[Callable], Grades]:
    """Make the check of an exercise, with its name, from its solution: ``answers`` to the cases.

    The functions in ``mistakes`` get the solution, too, before the arguments of a case.
    """

    def check_of(solution: Callable) -> Grades:
        rules = {words: partial(rule, solution) for words, rule in mistakes.items()}
        names = ", ".join(inspect.signature(solution).parameters)
        options: dict[str, Any] = {"signature": names, "mistakes": rules, "kind": kind}
        expected = [(case, solution(*case)) for case in cases]
        return _check(solution, lambda name, fn: answers(fn, expected, name=name, **options))

    return check_of


def _check(of: Callable, grade: Callable[[str, Callable], Verdict]) -> Grades:
    check = partial(grade, f"{of.__module__.rpartition('.')[2]}.{of.__name__}")
    check.__doc__ = of.__doc__
    return check


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
    found = _asked(fn, questions, call, (signature, may_call))
    if is_stub(fn, found.stub):
        return Verdict(name, NOT_ATTEMPTED)
    asked = list(zip(questions, found.answers))
    for question, answer in asked:
        wrong = f"{question.words}: {answer}" if isinstance(answer, Wrong) else None
        if wrong := wrong or problem(question, answer):
            for sentence, rule in (mistakes or {}).items():
                if all(agree(one, rule(*asks.args)) for asks, one in asked):
                    wrong += f": {sentence}"
                    break
            return Verdict(name, NOT_YET, notes=[wrong])
    if found.stub:
        place = questions[len(found.answers)].words
        return Verdict(name, NOT_YET, notes=[f"{place}: {about_stub(fn, found.stub)}"])
    if found.broken:
        # Only this process knows the numbers of a notebook's cells.
        text, at = found.broken
        return Verdict(name, NOT_YET, notes=[text + readable(at)])
    for question, first, second in zip(questions, found.answers, found.again):
        if not agree(second, first):
            text = f"{question.words} returned {short(first)} the first time, but {short(second)} "
            return Verdict(name, NOT_YET, notes=[f"{text}the second time"])
    if found.changed:
        return Verdict(name, NOT_YET, notes=[found.changed])
    if found.library:
        return Verdict(name, NOT_YOURS, notes=[CALLS_LIBRARY.format(name=found.library)])
    return Verdict(name, PASSED, notes=[right(found.answers)])


def _asked(fn: Callable, questions: Sequence[Question], call: Callable, watching: tuple) -> Asked:
    """Ask all questions, in a process that can be ended if there may be one."""
    given = [(question.args, question.words) for question in questions]

    def elsewhere(given: list, timeout_s: float) -> Asked:
        parts = fn, given, call, watching, timeout_s
        return in_one_process(_answered, *parts, timeout_s=timeout_s + _MORE_S)

    try:
        return elsewhere(given, TIMEOUT_S)
    except ValueError:  # the function cannot travel, or this process may not start others
        return _answered(None, fn, given, call, watching, TIMEOUT_S)
    except WorkerError as error:
        if "before it had started" in str(error):
            return _answered(None, fn, given, call, watching, TIMEOUT_S)
        failure = error
    place, answers = f"one of {len(given)} calls", []
    for one in given[:_ONE_BY_ONE]:
        try:
            found = elsewhere([one], AGAIN_S)
        except WorkerError as error:
            place, failure = one[1], error
            break
        if not found.answers:
            return found._replace(answers=answers)
        answers += found.answers
    if isinstance(failure, DeadlineError):
        return Asked(answers, [], (f"{place}: {_ENDLESS.format(TIMEOUT_S)}", ""))
    story = story_of(failure).replace("rank 0", "the function")
    return Asked(answers, [], (f"{place}: {story}", ""))


_ENDLESS = "the function was still running after {:g} s: look for a loop that does not end"


def _answered(
    comm: Comm | None,
    fn: Callable,
    given: list[tuple[tuple, str]],
    call: Callable,
    watching: tuple,
    timeout_s: float,
) -> Asked:
    """Call ``fn`` for all arguments, then once more in the opposite order."""
    watched, answers, again = Watched(fn, *watching), [], []
    begin_s = time.monotonic()

    def failed(text: str, error: BaseException) -> Asked:
        place = given[len(answers) if len(answers) < len(given) else -1 - len(again)][1]
        frames = [f for f in extract_tb(error.__traceback__) if not is_internal(f.filename)]
        at = f'\n  at "{frames[-1].filename}", line {frames[-1].lineno}' if frames else ""
        return Asked(answers, [], (f"{place}: {text}", at))

    def travels(answer: Any) -> Any:
        """The answer, or what it says of itself, if it cannot be sent back."""
        answer = plain(answer) if isinstance(answer, Iterator) else answer
        try:
            cloudpickle.dumps(answer)
        except Exception:
            return f"{answer!r:.200}"
        return answer

    try:
        with limited_time(timeout_s), limited_memory():
            for args, _ in given:
                # A copy, because the function may change its arguments.
                answers.append(travels(call(watched, *copy.deepcopy(args))))
            if time.monotonic() - begin_s < timeout_s / 4:
                for args, _ in reversed(given):
                    again.insert(0, travels(call(watched, *copy.deepcopy(args))))
    except OutOfTime as error:
        return failed(_ENDLESS.format(timeout_s), error)
    except Exception as error:
        text = f"the function raised {type(error).__name__}: {error}".removesuffix(": ")
        return failed(text, error)._replace(stub=raised_by_stub(error))
    return Asked(answers, again, library=watched.library, changed=watched.changed)
