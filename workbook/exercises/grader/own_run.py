"""The learner's own run, drawn: what a function did on real ranks, beside its target and labkit's.

Each function is called twice on every rank: first to count what it sends and the memory it holds,
then, without the counting, for the timeline.
"""

import html
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.comm.comm import Comm
from labkit.comm.emulated_link import EmulatedLink
from labkit.errors import WorkerError
from labkit.runtime.launch import run
from labkit.runtime.output import undrawn
from labkit.units import format_bytes, format_count
from workbook.exercises.grader.exercise import Case, Exercise
from workbook.exercises.grader.held_memory import PeakBytes
from workbook.exercises.grader.judge_traffic import ROWS, by_rank, targets_of
from workbook.exercises.grader.on_ranks import TIMEOUT_S, call_once
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, card_html, card_text

if TYPE_CHECKING:
    from workbook.plots import CaptionedFigure

WORLD_SIZE = 4
HELD = "memory held"


@dataclass(frozen=True)
class OwnRun:
    """A learner's run: a sentence and a table (yours, target, labkit) above the timelines."""

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
        figure = repr(self.figure) if self.figure else ""
        return card_text(title, [], self.columns, self.rows, self.caption, figure)

    def _repr_html_(self) -> str:
        title = f"<strong>Your run of {html.escape(self.name)}</strong>: "
        title += html.escape(self.sentence)
        page = card_html(title, [], self.columns, self.rows, self.caption)
        page += self.figure.html() if self.figure else ""
        if self.library_figure:
            page += "<details><summary>The same by labkit</summary>"
            page += f"{self.library_figure.html()}</details>"
        return page


def own_run(
    fn: Callable,
    exercise: Exercise,
    status: str,
    world_size: int = WORLD_SIZE,
    link: EmulatedLink | None = None,
) -> OwnRun:
    """Run a learner's function once more, for its timeline; nothing is raised.

    ``status`` is that of its verdict; they run over ``link`` where as many ranks fill its hosts.
    """
    # Imported here: ranks load the checks, but draw nothing.
    from workbook.plots.timeline import timeline

    name = exercise.name
    if status == NOT_ATTEMPTED:
        return OwnRun.failed(name, status)
    case = Case(world_size, exercise.drawn_size or (exercise.sizes or (0,))[0])
    fns = [fn, exercise.library] if exercise.library else [fn]
    link = None if link and world_size % (link.ranks_per_host or 1) else link
    options: dict[str, Any] = {"world_size": world_size, "device": "cpu", "link": link}
    try:
        with undrawn():
            result = run(_spend, fns, exercise.to_run(), case, timeout_s=TIMEOUT_S, **options)
    except (WorkerError, ValueError):
        return OwnRun.failed(name, status)
    targets = targets_of(exercise, case) if exercise.target else []
    columns = ["yours", *(["target"] if targets else []), *("labkit" for _ in fns[1:])]
    rows: dict[str, list[str]] = {row: [] for row in ("messages", "bytes", "rounds", HELD)}
    figures = []
    for whose, by_fn in zip(("your function", "labkit's"), zip(*result.values)):
        counts, starts_s, ends_s = zip(*by_fn)
        for row, cells in rows.items():
            cells.append(_cell(row, [one[row] for one in counts]))
            if targets and not figures:
                allowed = by_rank(row, targets) if row in ROWS else [None]
                cells.append("-" if None in allowed else _cell(row, allowed))
        span = {"start_s": min(starts_s), "end_s": max(ends_s)}
        figures.append(timeline(result.trace, title=f"{name}, {whose}", **span))
    ranks, elements = exercise.nouns
    what = format_count(world_size, ranks or "rank")
    what += f" and {format_count(case.size, elements)}" if exercise.sizes and elements else ""
    caption = f"With {what}. Where ranks differ, the numbers are by rank. Rounds are a rank's "
    caption += "calls of send, recv and exchange; memory held is the most that its new tensors "
    caption += "took at one time."
    sentence = "not right yet." if status == NOT_YET else f"{status}."
    return OwnRun(name, sentence, columns, rows, caption, *figures)


def _spend(
    comm: Comm, fns: list[Callable], exercise: Exercise, case: Case
) -> list[tuple[dict[str, int], float, float]]:
    """On a rank: counts by row, start and end in seconds of its trace, of each function."""
    recorder, found = comm.session.recorder, []

    def now_s() -> float:
        return recorder.timer.seconds(recorder.timer.mark(), recorder.origin)

    for fn in fns:
        held, seconds = PeakBytes(), list[float]()

        @contextmanager
        def noted(seconds: list[float] = seconds) -> Iterator[None]:
            """What is done between messages (copies, additions) is recorded as ``compute``."""
            seconds.append(now_s())
            with comm.span("compute"):
                yield
            seconds.append(now_s())

        comm.barrier()
        args = exercise.inputs(comm.rank, case)
        outcome = call_once(comm, fn, exercise, args, lambda held=held: held)
        # The ranks make their arguments before they start together.
        args = exercise.inputs(comm.rank, case)
        comm.barrier()
        call_once(comm, fn, exercise, args, noted)
        counts = {row: getattr(outcome, ROWS[row]) for row in ROWS} | {HELD: held.num_bytes}
        # On a rank whose part the check plays, the function is not called.
        found.append((counts, min(seconds, default=math.inf), max(seconds, default=-math.inf)))
    return found


def _cell(row: str, numbers: list[int]) -> str:
    """One number if all ranks have the same, else the numbers by rank."""
    in_bytes = row in ("bytes", HELD)
    shown = [format_bytes(n) if in_bytes else f"{n:,}" for n in numbers]
    return shown[0] if len(set(shown)) == 1 else "  ".join(shown)
