"""Exercises that need no ranks: a function of plain values, called in one other process.

The process can be ended, whatever the function does: an endless loop, also inside of a function
of C, or a call of ``sys.exit``. A function that cannot be sent there is called in this process.
"""

import copy
import inspect
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from traceback import extract_tb
from typing import Any, NamedTuple

import cloudpickle

from labkit.comm.comm import Comm
from labkit.comm.source_lines import is_internal, readable
from labkit.errors import DeadlineError, WorkerError
from workbook.exercises.grader.compare import agree, plain
from workbook.exercises.grader.limits import OutOfTime, limited_memory, limited_time
from workbook.exercises.grader.on_ranks import AGAIN_S, in_one_process, story_of
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, Verdict, status_of_right, told
from workbook.exercises.grader.stub import about_stub, is_stub, is_untouched, raised_by_stub
from workbook.exercises.grader.watched import Watched
from workbook.exercises.grader.words import Found, Mistake, named

# All questions together take milliseconds. The process is ended a little after the function.
TIMEOUT_S = 6.0
_MORE_S = 2.0
# How many questions are asked one by one, each in its own process, after a process has ended.
_ONE_BY_ONE = 12


class Question(NamedTuple):
    """One call of the learner's function: its arguments, its name, the expected result."""

    args: tuple
    words: str
    due: Any = None


class Wrong(Exception):
    """Raised by ``call`` when an answer cannot be judged; carries the mistake."""

    def __init__(self, mistake: Mistake):
        super().__init__(mistake)
        self.mistake = mistake


class Asked(NamedTuple):
    """What the learner's function has answered.

    Attributes:
        answers: to the first questions, in their order.
        again: the same answers in a second call, as far as there was time for it.
        broken: why the next question has no answer.
        stub: the function whose stub was reached.
        library: a function called that solves the exercise, see ``Watched``.
    """

    answers: list
    again: list
    broken: Mistake | None = None
    stub: str = ""
    library: str = ""


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
        mistakes: a mistake's id (or a page's own sentence) -> a function that makes this mistake.
            The mistake is named if all answers equal those of that function.
        kind: ``list`` or ``bool``, to convert each answer, so that other types are accepted.

    Returns:
        The verdict. Nothing is raised: the verdict tells every failure.
    """
    own_name = getattr(fn, "__name__", type(fn).__name__)
    pairs = expected.items() if isinstance(expected, Mapping) else expected
    questions = [Question(args, _in_words(fn, args, signature), due) for args, due in pairs]
    name, wrong = name or own_name, (mistakes or {}).items()
    options = {"mistakes": wrong, "call": partial(_converted, kind), "signature": signature}
    return told(name, partial(ask, name, fn, questions, differs, **options))


def _converted(kind: Callable[[Any], Any] | None, fn: Callable, *args: Any) -> Any:
    answer = fn(*args)
    if kind is None or answer is None:
        return answer
    try:
        return kind(answer)
    except (TypeError, ValueError, RuntimeError):
        return answer


def _in_words(fn: Callable, args: tuple, signature: str) -> str:
    """The call as one would write it: ``bubble(num_stages=4, micro_batches=8)``."""
    names = signature.split(", ") if signature else _parameter_names(fn)
    named = [f"{name}={arg!r}" for name, arg in zip(names, args)]
    named += [repr(arg) for arg in args[len(named) :]]
    return f"{getattr(fn, '__name__', type(fn).__name__)}({', '.join(named)})"


def _parameter_names(fn: Callable) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


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
    signature: str = "",
    may_call: Collection[str] = (),
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
        signature: the names of the arguments with which ``call`` calls the function.
        may_call: as in ``Watched``.
    """
    if not callable(fn):
        return Verdict(name, NOT_YET, notes=[Mistake("fn.missing", kind=type(fn).__name__)])
    if is_untouched(fn):
        return Verdict(name, NOT_ATTEMPTED)
    found = _asked(fn, questions, call, (signature, may_call))
    if is_stub(fn, found.stub):
        return Verdict(name, NOT_ATTEMPTED)
    asked = list(zip(questions, found.answers))
    wrong = next(filter(None, (problem(*pair) for pair in asked)), None)
    if wrong:
        wrong.explain(_explanation(asked, mistakes))
    wrong = wrong or _broken(fn, questions, found) or _other_the_second_time(questions, found)
    if wrong:
        return Verdict(name, NOT_YET, notes=[wrong])
    if found.library:
        notes: list[Mistake | str] = [Mistake("library.called", name=found.library)]
    else:
        notes = [right(found.answers)]
    return Verdict(name, status_of_right(notes), notes=notes)


def _broken(fn: Callable, questions: Sequence[Question], found: Asked) -> Mistake | None:
    if found.stub:
        place = f"{questions[len(found.answers)].words}: "
        return about_stub(fn, found.stub, place)
    if found.broken and "at" in found.broken.details:
        # Only this process knows the numbers of a notebook's cells.
        found.broken.details["at"] = readable(found.broken.details["at"])
    return found.broken


def _other_the_second_time(questions: Sequence[Question], found: Asked) -> Mistake | None:
    for question, first, second in zip(questions, found.answers, found.again):
        if not agree(second, first):
            both = {"first": repr(first), "second": repr(second)}
            return Mistake("answer.second_call", call=question.words, **both)
    return None


def _explanation(asked: list[tuple[Question, Any]], mistakes: Iterable) -> Found:
    for key, wrong in mistakes:
        if all(agree(answer, wrong(*question.args)) for question, answer in asked):
            return named(key)
    return None


# The calls


def _asked(fn: Callable, questions: Sequence[Question], call: Callable, watching: tuple) -> Asked:
    """Ask all questions, in a process that can be ended if there may be one.

    ``watching``: what ``Watched`` is to know besides the function.
    """
    given = [(question.args, question.words) for question in questions]
    try:
        return _elsewhere(fn, given, call, watching, TIMEOUT_S)
    except ValueError:  # the function cannot travel, or this process may not start others
        return _answered(None, fn, given, call, watching, TIMEOUT_S)
    except WorkerError as error:
        if "before it had started" in str(error):
            return _answered(None, fn, given, call, watching, TIMEOUT_S)
        failure = error
    answers: list = []
    for (args, words), _ in zip(given, range(_ONE_BY_ONE)):
        try:
            found = _elsewhere(fn, [(args, words)], call, watching, AGAIN_S)
        except WorkerError as error:
            return Asked(answers, [], _ended(words, error))
        if not found.answers:
            return found._replace(answers=answers)
        answers += found.answers
    return Asked(answers, [], _ended(f"one of {len(given)} calls", failure))


def _elsewhere(
    fn: Callable, given: list, call: Callable, watching: tuple, timeout_s: float
) -> Asked:
    parts = fn, given, call, watching, timeout_s
    return in_one_process(_answered, *parts, timeout_s=timeout_s + _MORE_S)


def _ended(words: str, error: WorkerError) -> Mistake:
    """What to tell about a process that has ended, or had to be ended."""
    story = story_of(error).replace("rank 0", "the function")
    if isinstance(error, DeadlineError):
        line = re.search(r"\n  (.*)", story)
        at = f"\n  at {line[1]}" if line and "/lib/python" not in line[1] else ""
        return Mistake("answer.endless", place=words, seconds=TIMEOUT_S, at=at)
    return Mistake("answer.ended", place=words, story=story)


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

    def failed(mistake: str, **details: Any) -> Asked:
        place = given[len(answers) if len(answers) < len(given) else -1 - len(again)][1]
        return Asked(answers, [], Mistake(mistake, place=place, **details))

    try:
        with limited_time(timeout_s), limited_memory():
            for args, _ in given:
                # A copy, because the function may change its arguments.
                answers.append(_travels(call(watched, *copy.deepcopy(args))))
            if time.monotonic() - begin_s < timeout_s / 4:
                for args, _ in reversed(given):
                    again.insert(0, _travels(call(watched, *copy.deepcopy(args))))
    except Wrong as error:
        return failed("told.place", what=error.mistake)
    except OutOfTime as error:
        return failed("answer.endless", seconds=timeout_s, at=_line(error))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        raised = failed("answer.raised", error=text, at=_line(error))
        return raised._replace(stub=raised_by_stub(error))
    return Asked(answers, again, library=watched.library)


def _travels(answer: Any) -> Any:
    """The answer, or what it says of itself, if it cannot be sent back."""
    answer = plain(answer) if isinstance(answer, Iterator) else answer
    try:
        cloudpickle.dumps(answer)
    except Exception:
        return f"{answer!r:.200}"
    return answer


def _line(error: BaseException) -> str:
    """The learner's line at which an error was raised, on a line for itself."""
    frames = [f for f in extract_tb(error.__traceback__) if not is_internal(f.filename)]
    return f'\n  at "{frames[-1].filename}", line {frames[-1].lineno}' if frames else ""
