"""The learner's own run, drawn: what a function did on real ranks, beside its target and labkit's.

Each function is called twice on every rank: first to count what it sends and the memory it holds,
then, without the counting, for the timeline.
"""

import functools
import html
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.comm.comm import Comm
from labkit.comm.emulated_link import EmulatedLink
from labkit.errors import WorkerError
from labkit.runtime.launch import run
from labkit.runtime.output import undrawn
from labkit.tracing import Trace
from labkit.units import format_bytes, format_count, html_table, text_table
from workbook.exercises.grader.exercise import Case, Exercise
from workbook.exercises.grader.held_memory import PeakBytes
from workbook.exercises.grader.judge_traffic import ROWS as FIELDS, by_rank, targets_of
from workbook.exercises.grader.on_ranks import TIMEOUT_S, call_once
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET

if TYPE_CHECKING:
    from workbook.plots import CaptionedFigure

WORLD_SIZE = 4
ROWS = ("messages", "bytes", "rounds")
HELD = "memory held"
_IN_BYTES = ("bytes", HELD)


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

    @staticmethod
    def failed(name: str, status: str) -> "OwnRun":
        """Without a run; the check has told why, if it was attempted."""
        why = "it did not finish, as the check says"
        if status == NOT_ATTEMPTED:
            why = "not attempted yet"
        return OwnRun(name, f"{why}, so there is nothing to draw.")

    def __repr__(self) -> str:
        title = f"your run of {self.name}: {self.sentence}"
        if not self.rows:
            return title
        table = text_table(["", *self.columns], self._table())
        return "\n\n".join([title, table, self.caption, repr(self.figure)])

    def _repr_html_(self) -> str:
        title = f"<p><strong>Your run of {html.escape(self.name)}</strong>: "
        title += f"{html.escape(self.sentence)}</p>"
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


class Spent(NamedTuple):
    """What one call of a function took, and when it ran in its trace.

    ``counts`` is by row, then by rank (or one number, where the target is that of all ranks).
    """

    counts: dict[str, list[int]]
    start_s: float
    end_s: float


def own_run(
    fn: Callable,
    exercise: Exercise,
    status: str,
    world_size: int = WORLD_SIZE,
    link: EmulatedLink | None = None,
) -> OwnRun:
    """Run a learner's function once more, for its timeline; nothing is raised.

    Args:
        fn: the learner's function.
        exercise: what it has to do; ``exercise.drawn_size`` elements are used.
        status: of its verdict.
        world_size: P.
        link: over which four ranks run.
    """
    if status == NOT_ATTEMPTED:
        return OwnRun.failed(exercise.name, status)
    case = Case(world_size, exercise.drawn_size or (exercise.sizes or (0,))[0])
    fns = [fn, exercise.library] if exercise.library else [fn]
    link = link if world_size == WORLD_SIZE else None
    options: dict[str, Any] = {"world_size": world_size, "device": "cpu", "link": link}
    try:
        with undrawn():
            result = run(_spend, fns, exercise.to_run(), case, timeout_s=TIMEOUT_S, **options)
    except (WorkerError, ValueError):
        return OwnRun.failed(exercise.name, status)
    if not result.trace.spans:
        return OwnRun(exercise.name, "no message was sent, so there is nothing to draw.")
    own, *others = (_over_ranks(parts) for parts in zip(*result.values))
    targets = targets_of(exercise, case) if exercise.target else []
    rows = {}
    for row, spent in own.counts.items():
        allowed = by_rank(row, targets) if row in FIELDS else []
        allowed = [] if None in allowed else allowed
        shown = [spent, *([allowed] if targets else []), *(other.counts[row] for other in others)]
        rows[row] = [_cell(row, one) for one in shown]
    ranks, elements = exercise.nouns
    what = format_count(world_size, ranks or "rank")
    what += f" and {format_count(case.size, elements)}" if exercise.sizes and elements else ""
    caption = f"With {what}. Where ranks differ, the numbers are by rank. Rounds are a "
    caption += "rank's calls of send, recv and exchange; memory held is the most that its new "
    caption += "tensors took at one time."
    draw = functools.partial(_draw, result.trace, exercise.name)
    library_figure = draw(others[0], "labkit's") if others else None
    return OwnRun(
        exercise.name,
        "not right yet." if status == NOT_YET else f"{status}.",
        ["yours", *(["target"] if targets else []), *("labkit" for _ in others)],
        rows,
        caption,
        draw(own, "your function"),
        library_figure,
    )


def _spend(
    comm: Comm, fns: list[Callable], exercise: Exercise, case: Case
) -> list[tuple[dict[str, int], float, float]]:
    """On a rank: counts by row, start and end, of each function."""
    found = []
    for fn in fns:
        comm.barrier()
        held, clock = PeakBytes(), _Clock(comm)
        outcome = call_once(comm, _within(held, fn), exercise, case)
        counts = {row: getattr(outcome, FIELDS[row]) for row in ROWS} | {HELD: held.num_bytes}
        # The ranks make their arguments before they start together.
        args = exercise.inputs(comm.rank, case)
        comm.barrier()
        ready = replace(exercise, inputs=lambda rank, case, args=args: args)
        call_once(comm, clock.around(fn), ready, case)
        found.append((counts, clock.start_s, clock.end_s))
    return found


def _within(held: PeakBytes, fn: Callable) -> Callable:
    @functools.wraps(fn)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with held:
            return fn(*args, **kwargs)

    return counted


class _Clock:
    """Note when a function starts and ends, in seconds of this rank's trace.

    What the function does between its messages (copies, additions) is recorded as ``compute``.
    On a rank whose part the check plays, the function is not called, and has no times.
    """

    def __init__(self, comm: Comm):
        self._comm, self._recorder = comm, comm.session.recorder
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


def _over_ranks(parts: tuple) -> Spent:
    counts, start_s, end_s = zip(*parts)
    by_row = {row: [one[row] for one in counts] for row in counts[0]}
    return Spent(by_row, min(start_s), max(end_s))


def _cell(row: str, numbers: list[int]) -> str:
    """One number if all ranks have the same, else the numbers by rank."""
    shown = [format_bytes(n) if row in _IN_BYTES else f"{n:,}" for n in numbers] or ["-"]
    return shown[0] if len(set(shown)) == 1 else "  ".join(shown)


def _draw(trace: Trace, name: str, spent: Spent, whose: str) -> "CaptionedFigure | None":
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
    own = Trace.merge([inside], trace.devices)
    end_s = spent.end_s - spent.start_s
    return timeline(own, title=f"{name}, {whose}", start_s=0.0, end_s=end_s)
