"""Run a learner's function on real ranks, and judge its results and its traffic.

``grade`` makes one ``labkit.run`` per world size, with all tensor sizes in it, judges values and
traffic, shows one verdict, and never raises.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from labkit import collectives
from labkit.runtime.messages import dumps
from labkit.units import format_count
from workbook.exercises.grader.exercise import (
    Case,
    Exercise,
    Found,
    Ranks,
    new_seed,
    no_arguments,
    nothing,
)
from workbook.exercises.grader.judge_traffic import (
    FIELDS,
    Scored,
    by_rank,
    counts,
    praise,
    score_of,
    traffic_problems,
)
from workbook.exercises.grader.judge_values import Problem, value_problem
from workbook.exercises.grader.on_ranks import DidNotFinish, outcomes_of
from workbook.exercises.grader.own_run import own_run
from workbook.exercises.grader.report import (
    CALLS_LIBRARY,
    NOT_ATTEMPTED,
    NOT_YET,
    NOT_YOURS,
    PASSED,
    Verdict,
    told,
)
from workbook.exercises.grader.stub import about_stub, is_stub, is_untouched
from workbook.exercises.grader.watched import names_to_call_by

WORLD_SIZES = (2, 3, 4)


def grade(fn: Callable, exercise: Exercise, world_sizes: Iterable[int] = WORLD_SIZES) -> Verdict:
    """Run ``fn`` on real ranks, print the verdict and return it.

    Args:
        fn: the learner's function, called with the arguments of ``exercise.signature``.
        exercise: what ``fn`` has to do.
        world_sizes: the P to try, in this order.

    Returns:
        The verdict. Nothing is raised: the verdict tells every failure.
    """

    def judge() -> Verdict:
        if misuse := _misuse(fn, exercise.signature):
            return Verdict(exercise.name, NOT_YET, notes=[misuse])
        return grade_on_ranks(fn, exercise, world_sizes)

    verdict = told(exercise.name, judge)
    verdict.run_again = partial(own_run, fn, exercise)
    return verdict


def returns(
    fn: Callable,
    expected: Callable[[int, Case], Any] = nothing,
    *,
    name: str = "",
    inputs: Callable[[int, Case], tuple] = no_arguments,
    signature: str = "comm",
    world_sizes: Iterable[int] = WORLD_SIZES,
    sizes: tuple[int, ...] = (),
    **more: Any,
) -> Verdict:
    """Grade a function by what each rank returns: an ``Exercise`` in one call.

    Args:
        fn: the learner's function, called with the arguments of ``signature``.
        expected: (rank, case) -> what the rank must return.
        name: the name of the exercise, by default that of the function.
        inputs: (rank, case) -> the arguments after ``comm``.
        signature: the names of all arguments, in one string.
        world_sizes: the P to try, in this order.
        sizes: the numbers of elements to try in ``case.tensor(rank)``, if it is used.
        more: other fields of ``Exercise``: ``target=``, ``mistakes=``, ``judge=``. By default the
            function may call ``labkit.collectives``, except for the function of the same name.

    Returns:
        The verdict, as ``grade`` does.
    """
    name = name or getattr(fn, "__name__", type(fn).__name__)
    # A page's own exercise may be built on sums over ranks; not on the function that it asks for.
    more.setdefault("may_call", frozenset(dir(collectives)) - {name})
    exercise = Exercise(name, expected, inputs, signature, written=None, sizes=sizes, **more)
    return grade(fn, exercise, world_sizes)


def _misuse(fn: Callable, signature: str) -> Found:
    """Return why ``fn`` cannot be called on a rank, or None if it can."""
    if not callable(fn):
        kind = type(fn).__name__
        return f"expected a function, got {kind}: pass the function's name, without ()"
    takes = None
    try:
        takes = inspect.signature(fn)
        names = names_to_call_by(fn, signature)
        takes.bind(*([] if names else signature.split(", ")), **dict.fromkeys(names))
    except TypeError:
        return f"the function takes {takes}, but the check calls it with ({signature})"
    except ValueError:
        pass  # a builtin without a signature: wrong arguments show in the call
    try:
        dumps(fn)
    except Exception as error:
        why = f"because of an object from outside that it uses ({error})"
        return f"the function cannot be sent to other processes, {why}: create it inside"
    return None


def grade_on_ranks(fn: Callable, exercise: Exercise, world_sizes: Iterable[int]) -> Verdict:
    """Return the verdict on a function that can be called, without printing it."""
    if is_untouched(fn):
        return Verdict(exercise.name, NOT_ATTEMPTED)
    columns: dict[int, dict[str, str]] = {}
    problems: dict[str, Problem] = {}
    best: Scored | None = None
    seed, library, praises = new_seed(), "", list[str]()
    for world_size in world_sizes:
        cases, failure = exercise.cases(world_size, seed), None
        try:
            tried = outcomes_of(fn, exercise, cases)
        except DidNotFinish as did_not:
            failure, tried = did_not, did_not.tried
            if is_stub(fn, failure.unwritten):
                return Verdict(exercise.name, NOT_ATTEMPTED)
        found, best = _judged(exercise, tried)
        # Where two world sizes have the same problem, the larger one shows more of it.
        problems |= {problem.row: problem for problem in found}
        columns[world_size] = _column(exercise, tried, best, found)
        if failure is not None:
            about = about_stub(fn, failure.unwritten) if failure.unwritten else str(failure)
            problems["finished"] = Problem("finished", failure.ending, about)
            columns[world_size] = {"finished": failure.ending} | columns[world_size]
            columns[world_size]["finished"] = failure.ending
            break
        library = library or next((o.library for r in tried.values() for o in r if o.library), "")
        praises = [best.praise(exercise.score, world_size)] if exercise.score and best else []
        praises += praise(exercise, cases[0], tried[cases[0]])
    return _verdict(exercise, columns, list(problems.values()), library, praises, best)


def _judged(exercise: Exercise, tried: dict[Case, Ranks]) -> tuple[list[Problem], Scored | None]:
    """What is wrong on one world size: the values, then the traffic, then rule and score."""
    first = value_problem(exercise, tried)
    found = [first] if first else []
    found += traffic_problems(exercise, tried, right=not found)
    if found or not tried:
        return found, None
    for case, ranks in tried.items():
        if broken := exercise.rule(case, ranks):
            text = f"all results are right, but {exercise.where(case)}: {broken}"
            return [Problem("rules", "broken", text)], None
    if exercise.score is None:
        return [], None
    best, problem = score_of(exercise, exercise.score, tried)
    return [problem] if problem else [], best


def _column(
    exercise: Exercise, tried: dict[Case, Ranks], best: Scored | None, found: list[Problem]
) -> dict[str, str]:
    """The cells of one world size."""
    if not tried:
        return {}
    case, ranks = next(iter(tried.items()))
    cells = {"finished": "yes"}
    wrong = {problem.row: problem.cell for problem in found}
    for row in ("shape", "value", "same bits"):
        used = {"shape": exercise.judge is None, "same bits": exercise.same_bits}
        if used.get(row, True):
            cells[row] = "-" if {"shape", "value"} & {*wrong} & {*cells} else "right"
            cells |= {row: wrong[row]} if row in wrong else {}
    if any(by_rank("barriers", ranks)):
        cells["barriers"] = counts(by_rank("barriers", ranks))
    if exercise.total is not None:
        cells |= {row: str(sum(by_rank(row, ranks))) for row in ("messages", "bytes")}
    if exercise.target is not None:
        target = exercise.target(0, case)
        for row, field in FIELDS.items():
            if getattr(target, field) is not None and row != "barriers":
                cells[row] = counts(by_rank(row, ranks))
        if target.peers is not None:
            cells["peers"] = "right"
    if best:
        cells |= {"score": best.yours, "best known": best.best}
    return cells | wrong


def _verdict(
    exercise: Exercise,
    columns: dict[int, dict[str, str]],
    problems: list[Problem],
    library: str,
    praises: list[str],
    best: Scored | None,
) -> Verdict:
    names = max(columns.values(), key=len)
    notes = [problem.sentence for problem in problems if problem.sentence]
    status = NOT_YET
    if not problems:
        status = NOT_YOURS if library else PASSED
        notes = [CALLS_LIBRARY.format(name=library)] if library else praises
    ranks, elements = exercise.nouns
    caption = ""
    if "messages" in names:
        size = exercise.sizes and elements and f", for {format_count(exercise.sizes[0], elements)}"
        whose = "each rank" if exercise.target is not None else "all ranks together"
        caption = f"Messages, bytes and rounds are those of {whose}{size or ''}."
    return Verdict(
        exercise.name,
        status,
        [format_count(n, ranks) if ranks else "this process" for n in columns],
        {name: [one.get(name, "-") for one in columns.values()] for name in names},
        notes,
        caption,
        best,
    )
