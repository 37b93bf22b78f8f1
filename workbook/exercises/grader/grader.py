"""Run a learner's function on real ranks, and judge its results and its traffic.

``grade`` makes one ``labkit.run`` per world size, with all tensor sizes in it, judges values and
traffic, shows one verdict, and never raises.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from labkit.engine.runtime.messages import UnpicklableError, dump_call
from labkit.units import format_count
from workbook.exercises.grader.exercise import Case, Exercise, Found, Problem, Ranks, new_seed
from workbook.exercises.grader.judge_traffic import (
    ROWS,
    by_rank,
    counts,
    targets_of,
    traffic_problems,
)
from workbook.exercises.grader.judge_values import value_problem
from workbook.exercises.grader.likely_mistake import likely_mistake
from workbook.exercises.grader.on_ranks import DidNotFinish, outcomes_of
from workbook.exercises.grader.own_run import own_run
from workbook.exercises.grader.report import (
    NOT_ATTEMPTED,
    NOT_YET,
    PASSED,
    Verdict,
    show_verdict,
)
from workbook.exercises.grader.stub import is_stub

WORLD_SIZES = (2, 3, 4)
# On so many ranks the values of different mistakes differ.
_ENOUGH = 4


def grade(fn: Callable, exercise: Exercise, world_sizes: Iterable[int] = WORLD_SIZES) -> Verdict:
    """Run ``fn`` on P real ranks for each of ``world_sizes``, print the verdict and return it.

    Nothing is raised: the verdict tells every failure.
    """
    sizes = tuple(world_sizes)
    # By its name in the module, which tests replace.
    verdict = show_verdict(exercise.name, lambda: grade_on_ranks(fn, exercise, sizes))
    if sizes != (1,):
        verdict.run_again = partial(own_run, fn, exercise)
    return verdict


@dataclass(frozen=True, eq=False)
class Check(Exercise):
    """An exercise that grades the function with which it is called."""

    world_sizes: tuple[int, ...] = WORLD_SIZES

    def __call__(self, fn: Callable, *, world_sizes: tuple[int, ...] = ()) -> Verdict:
        return grade(fn, self, world_sizes or self.world_sizes)


def _misuse(fn: Callable, signature: str) -> Found:
    """Return why ``fn`` cannot be called on a rank, or None if it can."""
    if not callable(fn):
        kind = type(fn).__name__
        return f"expected a function, got {kind}: pass the function's name, without ()"
    parameters = None
    with suppress(ValueError):  # a builtin without a signature; a generator function
        try:
            parameters = inspect.signature(fn)
            if signature:
                parameters.bind(*signature.split(", "))
        except TypeError:
            return f"the function takes {parameters}, but the check calls it with ({signature})"
        try:
            dump_call(fn, ())
        except UnpicklableError as error:
            return str(error)
    return None


def grade_on_ranks(fn: Callable, exercise: Exercise, world_sizes: Iterable[int]) -> Verdict:
    """Return the verdict on a function, without printing it."""
    if misuse := _misuse(fn, exercise.signature):
        return Verdict(exercise.name, NOT_YET, notes=[misuse])
    if is_stub(fn):
        return Verdict(exercise.name, NOT_ATTEMPTED)
    columns: dict[int, dict[str, str]] = {}
    problems: dict[str, Problem] = {}
    seed = new_seed()
    cases: list[Case] = []
    # The values that a cause has to explain. First come wrong ones of few ranks, but not of the
    # fewest.
    searched: dict[Case, Ranks] = {}
    for world_size in world_sizes:
        cases = exercise.cases(world_size, seed)
        try:
            tried = outcomes_of(fn, exercise, cases)
        except DidNotFinish as error:
            if problems:
                break
            earlier = _earlier_mistake(fn, exercise, cases[: cases.index(error.case)])
            notes = [*earlier, _in_words(Problem(str(error), _why_stuck(exercise, error)))]
            return Verdict(exercise.name, NOT_YET, notes=notes)
        problems_here = _problems(exercise, tried)
        # Of the same problem, the larger world size shows more.
        problems |= problems_here
        columns[world_size] = _column(exercise, tried, problems_here)
        is_first = "values" in problems_here and world_size <= _ENOUGH
        searched = tried | searched if is_first else searched | tried
    notes = []
    for row, problem in [*problems.items()][:1]:
        if row == "values" and not problem.cause:
            cause = likely_mistake(fn, exercise, searched) or problem.hint
            problem = problem._replace(cause=cause)
        notes.append(_in_words(problem))
    return _verdict(exercise, columns, notes, num_answers=len(cases) // 2)


def _why_stuck(exercise: Exercise, error: DidNotFinish) -> str:
    """The mistake with which a run did not end, if it can be told from who waits for whom."""
    waiting = r"rank (\d+) is in (?:send|exchange), waiting for rank (\d+) to receive"
    for rank, peer in re.findall(waiting, str(error)):
        if exercise.target is None:
            break
        allowed = exercise.target(int(rank), error.case).peers
        if allowed is not None and int(peer) not in allowed:
            return f"rank {rank} has nothing to send to rank {peer}"
    for pattern, explanation in exercise.stuck.items():
        if re.search(pattern, str(error)):
            return explanation
    return ""


def _earlier_mistake(fn: Callable, exercise: Exercise, cases: list[Case]) -> list[str]:
    """Explain the wrong values of calls that went without an error, if that is possible."""
    with suppress(DidNotFinish):
        tried = outcomes_of(fn, exercise, cases) if cases else {}
        if problem := value_problem(exercise, tried):
            cause = problem.cause or likely_mistake(fn, exercise, tried)
            return [_in_words(problem._replace(cause=cause))] if cause else []
    return []


def _verdict(
    exercise: Exercise, columns: dict[int, dict[str, str]], notes: list[str], num_answers: int
) -> Verdict:
    """The verdict that the cells by world size and row, and the problems, come to."""
    ranks, elements = exercise.nouns
    status = NOT_YET if notes else PASSED
    if not ranks:
        notes = notes or [f"all {num_answers} answers are right"]
        return Verdict(exercise.name, status, notes=notes)
    rows = {}
    for name in max(columns.values(), key=len):
        rows[name] = [column.get(name, "-") for column in columns.values()]
    caption = ""
    if "messages" in rows:
        caption = "Messages, bytes and rounds are those of each rank"
        if exercise.sizes and elements:
            caption += f", for {format_count(exercise.sizes[0], elements)}"
        caption += "."
    heads = [format_count(world_size, ranks) for world_size in columns]
    return Verdict(exercise.name, status, heads, rows, notes, caption)


def _in_words(problem: Problem) -> str:
    """The problem in words: in the first line its cause, if that is known, then the facts."""
    if not problem.cause:
        return problem.facts
    sentences = [problem.cause, problem.facts]
    return ".\n".join(sentence[:1].upper() + sentence[1:] for sentence in sentences)


def _problems(exercise: Exercise, tried: dict[Case, Ranks]) -> dict[str, Problem]:
    """The problems on one world size by row of the table, the first one first."""
    problems = {}
    if problem := value_problem(exercise, tried):
        problems["values"] = problem
    for row, facts in traffic_problems(exercise, tried).items():
        problems[row] = Problem(facts)
    if problems:
        return problems
    for case, ranks in tried.items():
        if broken := exercise.rule(case, ranks):
            facts, _, cause = broken.partition("\n")
            facts = f"all results are right, but {exercise.where(case)}: {facts}"
            return {"rule": Problem(facts, cause)}
    return {}


def _column(
    exercise: Exercise, tried: dict[Case, Ranks], problems: dict[str, Problem]
) -> dict[str, str]:
    """The cells of one world size: yours, beside the target where it is another."""
    case, ranks = next(iter(tried.items()))
    cells = {"values": "wrong" if "values" in problems else "right"}
    if "values" not in problems:
        cells |= exercise.more_cells(tried)
    if exercise.target is None:
        return cells
    targets = targets_of(exercise, case)
    for row in ROWS:
        spent = by_rank(row, ranks)
        target = by_rank(row, targets)
        if None in target or (row == "barriers" and not any(spent)):
            continue
        cells[row] = counts(spent)
        if spent != target:
            cells[row] += f" (target {counts(target)})"
    return cells
