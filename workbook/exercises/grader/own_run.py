"""The learner's own run, drawn: what a function did on real ranks, beside its target and labkit's.

Each function is called twice on every rank: first to count what it sends and the memory it holds,
then, without the counting, for the timeline.

Symbols: P ranks.
"""

import functools
import html
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.comm.comm import Comm
from labkit.errors import DeadlineError, DeadlockError, WorkerError
from labkit.runtime.launch import run
from labkit.runtime.watch import undrawn
from labkit.tracing import Trace
from labkit.units import format_bytes, format_count, format_number, html_table, text_table
from workbook.exercises.grader.exercise import Case, Exercise
from workbook.exercises.grader.held_memory import PeakBytes
from workbook.exercises.grader.judge_cards import ROW as CARD, bytes_out, cell
from workbook.exercises.grader.judge_traffic import FIELDS, by_rank
from workbook.exercises.grader.on_ranks import TIMEOUT_S, call_once, story_of
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET

if TYPE_CHECKING:
    from workbook.plots import CaptionedFigure

WORLD_SIZE = 4
ROWS = ("messages", "bytes", "rounds")
HELD = "memory held"
_WHOSE = ("your function", "labkit's")


class Spent(NamedTuple):
    """What one call of a function took, by rank, and when it ran in its trace.

    ``counts`` is by row: messages, bytes and rounds of each rank, and what leaves each host, if
    there are several. ``held_bytes`` is the most memory that each rank's new tensors held at one
    time.
    """

    counts: dict[str, list[int]]
    held_bytes: list[int]
    start_s: float
    end_s: float


@dataclass(frozen=True)
class OwnRun:
    """A learner's run: a table and a sentence, above the timeline.

    Attributes:
        name: of the exercise.
        sentence: how good the run is, in numbers; or why there is none.
        columns: whose numbers there are.
        rows: what was counted -> one cell per column.
        caption: what the numbers are.
        figure: the learner's timeline; None if there was no run.
        library_figure: labkit's timeline; None if labkit has no such function.
    """

    name: str
    sentence: str
    columns: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)
    caption: str = ""
    figure: "CaptionedFigure | None" = field(default=None, repr=False)
    library_figure: "CaptionedFigure | None" = field(default=None, repr=False)

    def __repr__(self) -> str:
        title = f"your run of {self.name}: {self.sentence}"
        if not self.rows:
            return title
        table = text_table(["", *self.columns], self._table())
        return "\n\n".join([title, table, self.caption, repr(self.figure)])

    def _repr_html_(self) -> str:
        # Why a run did not finish takes several lines.
        first, _, story = self.sentence.partition("\n")
        title = f"<p><strong>Your run of {html.escape(self.name)}</strong>: "
        title += f"{html.escape(first)}</p>"
        title += f"<pre>{html.escape(story)}</pre>" if story else ""
        if not self.rows:
            return title
        table = html_table(["", *self.columns], self._table())
        table += f"<p>{html.escape(self.caption)}</p>"
        drawn = self.figure.html() if self.figure else ""
        if self.library_figure:
            drawn += "<details><summary>The same by labkit</summary>"
            drawn += f"{self.library_figure.html()}</details>"
        return title + table + drawn

    def _table(self) -> list[list[str]]:
        return [[name, *cells] for name, cells in self.rows.items()]


def own_run(fn: Callable, exercise: Exercise, status: str, world_size: int = WORLD_SIZE) -> OwnRun:
    """Run a learner's function once more, for its timeline; nothing is raised.

    Args:
        fn: the learner's function.
        exercise: what it has to do; ``exercise.drawn_size`` elements are used.
        status: of its verdict.
        world_size: P.
    """
    if status == NOT_ATTEMPTED:
        return OwnRun(exercise.name, "not attempted yet, so there is nothing to draw.")
    case = Case(world_size, exercise.drawn_size or (exercise.sizes or (0,))[0])
    fns = [fn, exercise.library] if exercise.library else [fn]
    link = exercise.drawn_link if world_size == WORLD_SIZE else None
    options: dict[str, Any] = {"world_size": world_size, "device": "cpu", "link": link}
    options["timeout_s"] = TIMEOUT_S
    try:
        with undrawn():
            result = run(_spend, fns, exercise.to_run(), case, **options)
    except (WorkerError, ValueError) as error:
        story = _story(error, fn, exercise, case, options)
        return OwnRun(exercise.name, f"it did not finish, so there is nothing to draw.\n{story}")
    spent = [_over_ranks(parts, exercise, case) for parts in zip(*result.values)]
    if not result.trace.spans:
        return OwnRun(exercise.name, "no message was sent, so there is nothing to draw.")
    return _told(exercise, case, status, spent, result.trace)


def _story(
    error: Exception, fn: Callable, exercise: Exercise, case: Case, options: dict[str, Any]
) -> str:
    """Why a run did not finish. Of a deadlock, without the barriers around the function's call."""
    if isinstance(error, DeadlockError) and not isinstance(error, DeadlineError):
        try:
            with undrawn():
                run(call_once, fn, exercise.to_run(), case, **options)
        except (WorkerError, ValueError) as alone:
            error = alone
    return story_of(error)


def _spend(
    comm: Comm, fns: list[Callable], exercise: Exercise, case: Case
) -> list[tuple[dict[str, int], dict[int, int], int, float, float]]:
    """On a rank: counts by row, bytes by peer, held bytes, start and end, of each function."""
    found = []
    for fn in fns:
        comm.barrier()
        held = PeakBytes()
        outcome = call_once(comm, held.around(fn), exercise, case)
        counts = {row: getattr(outcome, FIELDS[row]) for row in ROWS}
        # The ranks make their arguments before they start together.
        ready = replace(
            exercise, inputs=functools.partial(_given, exercise.inputs(comm.rank, case))
        )
        comm.barrier()
        clock = _Clock(comm)
        call_once(comm, clock.around(fn), ready, case)
        to = outcome.bytes_to
        found.append((counts, to, held.num_bytes, clock.start_s, clock.end_s))
    return found


def _given(args: tuple, rank: int, case: Case) -> tuple:
    return args


class _Clock:
    """Note when a function starts and ends, in seconds of this rank's trace.

    What the function does between its messages (copies, additions) is recorded as ``compute``.
    On a rank whose part the check plays, the function is not called, and has no times.
    """

    def __init__(self, comm: Comm):
        self._comm = comm
        self._recorder = comm.session.recorder
        self.start_s, self.end_s = math.inf, -math.inf

    def _now_s(self) -> float:
        return self._recorder.timer.seconds(self._recorder.timer.mark(), self._recorder.origin)

    def around(self, fn: Callable) -> Callable:
        @functools.wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.start_s = self._now_s()
            with self._comm.span("compute"):
                result = fn(*args, **kwargs)
            self.end_s = self._now_s()
            return result

        return timed


def _over_ranks(parts: tuple, exercise: Exercise, case: Case) -> Spent:
    counts, sent_to, held_bytes, start_s, end_s = zip(*parts)
    by_row = {row: [one[row] for one in counts] for row in ROWS}
    if exercise.total is not None:
        by_row |= {row: [sum(by_row[row])] for row in ("messages", "bytes")}
        by_row["rounds"] = [max(by_row["rounds"])]
    if exercise.cards is not None:
        by_row[CARD] = bytes_out(exercise.cards(case), sent_to)
    return Spent(by_row, list(held_bytes), min(start_s), max(end_s))


def _told(exercise: Exercise, case: Case, status: str, spent: list[Spent], trace: Trace) -> OwnRun:
    own, *others = spent
    due = _target(exercise, case)
    figures = [_draw(trace, one, exercise.name, whose) for one, whose in zip(spent, _WHOSE)]
    return OwnRun(
        exercise.name,
        _sentence(status, own, due, others[0] if others else None),
        ["yours", *(["target"] if due else []), *("labkit" for _ in others)],
        {row: _cells(row, spent, due) for row in (*own.counts, HELD)},
        _caption(exercise, case),
        *figures,
    )


def _cells(row: str, spent: list[Spent], due: dict[str, list[int]]) -> list[str]:
    own, *others = [
        _cell(row, one.held_bytes if row == HELD else one.counts[row]) for one in spent
    ]
    target = [_cell(row, due[row]) if row in due else "-"] if due else []
    return [own, *target, *others]


def _cell(row: str, numbers: list[int]) -> str:
    """One number if all ranks have the same, else the numbers by rank."""
    as_bytes = row in ("bytes", HELD, CARD)
    shown = [format_bytes(n) if as_bytes else f"{n:,}" for n in numbers]
    return shown[0] if len(set(shown)) == 1 else "  ".join(shown)


def _caption(exercise: Exercise, case: Case) -> str:
    ranks, elements = exercise.nouns
    what = format_count(case.world_size, ranks or "rank")
    if exercise.sizes and elements:
        what += " and " + format_count(case.size, elements).replace(
            str(case.size), f"{case.size:,}"
        )
        what += " per rank" if elements == "element" else ""
    whose = "Where ranks differ, the numbers are by rank."
    if exercise.total is not None:
        whose = "Messages and bytes are those of all ranks together, rounds of the busiest rank."
    if exercise.cards is not None:
        flat = cell(exercise.cards(case).flat_bytes)
        whose += f" Card bytes leave a host; one ring through all ranks has {flat} of them."
    counted = (
        "Rounds are a rank's calls of send, recv and exchange; "
        "memory held is the most that its new tensors took at one time."
    )
    return f"With {what}. {whose} {counted}"


def _target(exercise: Exercise, case: Case) -> dict[str, list[int]]:
    """By row, what the target allows each rank, or all together; {} without a target."""
    targets = []
    if exercise.target is not None:
        targets = [exercise.target(rank, case) for rank in range(case.world_size)]
    elif exercise.total is not None:
        targets = [exercise.total(case)]
    by_row = {row: by_rank(row, targets) for row in ROWS}
    if exercise.cards is not None:
        by_row[CARD] = exercise.cards(case).num_bytes
    return {row: numbers for row, numbers in by_row.items() if numbers and None not in numbers}


def _draw(trace: Trace, spent: Spent, name: str, whose: str) -> "CaptionedFigure | None":
    # Imported here: ranks load the checks, but draw nothing.
    from workbook.plots.timeline import timeline

    inside = [
        replace(
            span,
            start_s=max(span.start_s, spent.start_s) - spent.start_s,
            end_s=min(span.end_s, spent.end_s) - spent.start_s,
        )
        for span in trace.spans
        if span.start_s < spent.end_s and span.end_s > spent.start_s
    ]
    if not inside:
        return None
    end_s = spent.end_s - spent.start_s
    own = Trace.merge([inside], trace.devices)
    return timeline(own, title=f"{name}, {whose}", start_s=0.0, end_s=end_s)


def _sentence(status: str, own: Spent, due: dict[str, list[int]], library: Spent | None) -> str:
    """How the run compares with the target, and with labkit's; of each, the busiest rank."""
    text = "not right yet" if status == NOT_YET else status
    if due:
        text += f", {_beside_target(own.counts, due, right=status != NOT_YET)}"
    if library is None:
        return f"{text}."
    ratios = _ratios(
        {**own.counts, HELD: own.held_bytes}, {**library.counts, HELD: library.held_bytes}
    )
    # Small tensors, such as counters, are not worth a sentence.
    differ = {row: ratio for row, ratio in ratios.items() if not 0.95 < ratio < 1.05}
    if not differ:
        return f"{text}. labkit's function takes the same."
    return f"{text}. Compared with labkit's function it takes {_times(differ)}."


def _ratios(own: dict[str, list[int]], other: dict[str, list[int]]) -> dict[str, float]:
    return {row: max(own[row]) / max(other[row]) for row in other if max(other[row])}


def _beside_target(own: dict[str, list[int]], due: dict[str, list[int]], right: bool) -> str:
    ratios = _ratios(own, due)
    # A number that is not divisible by P makes a chunk longer than the others by one.
    if more := {row: ratio for row, ratio in ratios.items() if ratio > 1.001}:
        return f"with {_times(more)} of the target"
    if less := {row: ratio for row, ratio in ratios.items() if ratio < 0.999}:
        better = ", which is better than asked" if right else ""
        return f"with {_times(less)} of the target{better}"
    if not ratios:
        return "without messages"
    in_all = [sum(own[row]) / sum(due[row]) for row in ratios]
    where = "" if all(0.999 < ratio < 1.001 for ratio in in_all) else " on the busiest rank"
    return f"with exactly the {_listed(ratios)} of the target{where}"


def _times(ratios: dict[str, float]) -> str:
    return _listed(f"{format_number(ratio)} times the {row}" for row, ratio in ratios.items())


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
