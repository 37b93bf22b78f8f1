"""Run a learner's function on real ranks, and judge its results and its traffic.

``grade`` makes one ``labkit.run`` per world size, with all tensor sizes in it, judges values and
traffic, prints one short table, and never raises.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from labkit import collectives
from labkit.runtime.pickling import dumps
from labkit.units import format_count
from workbook.exercises.grader.exercise import (
    Case,
    Exercise,
    Outcome,
    Problem,
    new_seed,
    no_arguments,
    nothing,
)
from workbook.exercises.grader.judge_cards import FLAT, ROW as CARD, bytes_out, cell
from workbook.exercises.grader.judge_traffic import (
    FIELDS,
    by_rank,
    counts,
    praise,
    traffic_problems,
)
from workbook.exercises.grader.judge_values import value_problems
from workbook.exercises.grader.on_ranks import DidNotFinish, outcomes_of
from workbook.exercises.grader.own_run import own_run
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, Verdict, status_of_right, told
from workbook.exercises.grader.score import Scored, praise_score, score_problems, scored
from workbook.exercises.grader.stub import about_stub, is_stub, is_untouched
from workbook.exercises.grader.watched import names_to_call_by
from workbook.exercises.grader.words import Mistake

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


def _misuse(fn: Callable, signature: str) -> Mistake | None:
    """Return why ``fn`` cannot be called on a rank, or None if it can."""
    if not callable(fn):
        return Mistake("fn.missing", kind=type(fn).__name__)
    takes = None
    try:
        takes = inspect.signature(fn)
        names = names_to_call_by(fn, signature)
        takes.bind(*([] if names else signature.split(", ")), **dict.fromkeys(names))
    except TypeError:
        return Mistake("fn.signature", takes=takes, signature=signature)
    except ValueError:
        pass  # a builtin without a signature: wrong arguments show in the call
    try:
        dumps(fn)
    except Exception as error:
        return Mistake("fn.cannot_travel", error=error)
    return None


def grade_on_ranks(fn: Callable, exercise: Exercise, world_sizes: Iterable[int]) -> Verdict:
    """Return the verdict on a function that can be called, without printing it."""
    if is_untouched(fn):
        return Verdict(exercise.name, NOT_ATTEMPTED)
    columns: dict[int, dict[str, str]] = {}
    problems: dict[str, Problem] = {}
    right: list[Mistake | str] = []
    best: Scored | None = None
    seed = new_seed()
    for world_size in world_sizes:
        cases, failure = exercise.cases(world_size, seed), None
        try:
            outcomes = outcomes_of(fn, exercise, cases)
        except DidNotFinish as did_not:
            failure = did_not
            if is_stub(fn, failure.unwritten):
                return Verdict(exercise.name, NOT_ATTEMPTED)
            cases, outcomes = list(failure.outcomes), list(failure.outcomes.values())
        found = value_problems(exercise, cases, outcomes)
        found += traffic_problems(exercise, cases, outcomes, right=not found)
        best = None
        if exercise.score and cases and not found:
            tried = dict(zip(cases, outcomes))
            found += score_problems(exercise.score, exercise, tried)
            best = scored(exercise.score, tried)
        # Where two world sizes have the same problem, the larger one shows more of it.
        problems |= {problem.row: problem for problem in found}
        columns[world_size] = _column(exercise, cases[0], outcomes[0]) if cases else {}
        if best:
            columns[world_size] |= {"score": best.yours, "best known": best.best}
        for problem in found:
            columns[world_size] |= {problem.row: problem.cell, **_not_looked_at(problem, exercise)}
        if failure is not None:
            problems["finished"] = _unfinished(fn, failure)
            columns[world_size] = {"finished": failure.ending} | columns[world_size]
            columns[world_size]["finished"] = failure.ending
            break
        right = _said_when_right(exercise, cases[0], outcomes, best)
    verdict = _verdict(exercise, columns, list(problems.values()), right)
    verdict.score = best
    return verdict


def _unfinished(fn: Callable, failure: DidNotFinish) -> Problem:
    """What to tell about a run that broke off."""
    mistake = failure.mistake
    if failure.not_attempted:
        mistake = about_stub(fn, failure.unwritten)
    return Problem("finished", failure.ending, mistake)


def _said_when_right(
    exercise: Exercise, case: Case, outcomes: list[tuple[Outcome, ...]], best: Scored | None
) -> list[Mistake | str]:
    """What to say if nothing is wrong: that it is the library's, or how good it is."""
    names = [outcome.library for ranks in outcomes for outcome in ranks if outcome.library]
    if names:
        return [Mistake("library.called", name=names[0])]
    said = []
    if exercise.score and best:
        said = [praise_score(exercise.score, case.world_size, best)]
    return [*said, *praise(exercise, case, outcomes[0])]


def _not_looked_at(problem: Problem, exercise: Exercise) -> dict[str, str]:
    """A dash for each row that is compared only if the rows before it are right."""
    rows = ["shape", "value", *(["same bits"] if exercise.same_bits else [])]
    return dict.fromkeys(rows[rows.index(problem.row) + 1 :] if problem.row in rows else [], "-")


def _column(exercise: Exercise, case: Case, ranks: tuple[Outcome, ...]) -> dict[str, str]:
    """The cells of one world size if nothing is wrong."""
    cells = {"finished": "yes", "value": "right"}
    if exercise.judge is None:
        cells = {"finished": "yes", "shape": "right", "value": "right"}
    if exercise.same_bits:
        cells["same bits"] = "yes"
    if any(by_rank("barriers", ranks)):
        cells["barriers"] = counts(by_rank("barriers", ranks))
    if exercise.total is not None:
        cells |= {row: str(sum(by_rank(row, ranks))) for row in ("messages", "bytes")}
    if exercise.target is not None:
        target = exercise.target(0, case)
        for row, field in FIELDS.items():
            if getattr(target, field) is not None and row != "barriers":
                cells[row] = "right" if row == "peers" else counts(by_rank(row, ranks))
    if exercise.cards is not None:
        cards, sent_to = exercise.cards(case), [outcome.bytes_to for outcome in ranks]
        cells[CARD] = cell(bytes_out(cards, sent_to))
        cells[FLAT] = cell(cards.flat_bytes)
    return cells


def _verdict(
    exercise: Exercise,
    columns: dict[int, dict[str, str]],
    problems: list[Problem],
    right: list[Mistake | str],
) -> Verdict:
    names = max(columns.values(), key=len)
    verdict = Verdict(exercise.name, NOT_YET if problems else status_of_right(right))
    noun = exercise.nouns[0]
    heads = {n: format_count(n, noun) if noun else "this process" for n in columns}
    verdict.columns = [exercise.ranks_words.get(n, head) for n, head in heads.items()]
    verdict.rows = {name: [c.get(name, "-") for c in columns.values()] for name in names}
    verdict.notes = [Mistake("told.row", row=p.row, what=p.mistake) for p in problems if p.mistake]
    verdict.notes += [] if problems else right
    verdict.caption = _caption(exercise, names)
    return verdict


def _caption(exercise: Exercise, rows: Iterable[str]) -> str:
    """What the numbers of the table are."""
    noun = exercise.nouns[1]
    size = f", for {format_count(exercise.sizes[0], noun)}" if exercise.sizes and noun else ""
    if "messages" in rows:
        whose = "each rank" if exercise.target is not None else "all ranks together"
        rounds = ", and rounds," if "rounds" in rows else ""
        return f"Messages and bytes sent{rounds} are those of {whose}{size}."
    if CARD in rows:
        both = "your function, and one ring through all ranks"
        return f"Card bytes are those that leave each host, by {both}{size}."
    return ""
