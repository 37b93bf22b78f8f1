"""The learner's own run, drawn: what a function does on real ranks, and what labkit's does."""

import html
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.comm.comm import Comm
from labkit.errors import WorkerError
from labkit.runtime.launch import run
from labkit.runtime.output import undrawn
from workbook.exercises.grader.exercise import Case, Exercise
from workbook.exercises.grader.on_ranks import TIMEOUT_S, call_once
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET

if TYPE_CHECKING:
    from workbook.plots import CaptionedFigure


@dataclass(frozen=True)
class OwnRun:
    """A learner's run: a sentence above its timeline, and labkit's in a fold."""

    name: str
    sentence: str
    figure: "CaptionedFigure | None" = field(default=None, repr=False)
    library_figure: "CaptionedFigure | None" = field(default=None, repr=False)

    @staticmethod
    def failed(name: str, status: str) -> "OwnRun":
        """Without a run; the check has told why, if it was attempted."""
        why = status if status == NOT_ATTEMPTED else "it did not finish, as the check says"
        return OwnRun(name, f"{why}, so there is nothing to draw.")

    def __repr__(self) -> str:
        title = f"your run of {self.name}: {self.sentence}"
        return f"{title}\n\n{self.figure!r}" if self.figure else title

    def _repr_html_(self) -> str:
        title = f"<strong>Your run of {html.escape(self.name)}</strong>"
        page = f"<p>{title}: {html.escape(self.sentence)}</p>"
        page += self.figure.html() if self.figure else ""
        if self.library_figure:
            fold = f"<summary>The same by labkit</summary>{self.library_figure.html()}"
            page += f"<details>{fold}</details>"
        return page


def own_run(fn: Callable, exercise: Exercise, status: str, world_size: int = 4) -> OwnRun:
    """Run a learner's function once more, for its timeline; nothing is raised.

    ``status`` is that of its verdict. Where so many ranks do not fill a link's hosts, it runs
    without.
    """
    # Imported here: ranks load the checks, but draw nothing.
    from workbook.plots.timeline import timeline

    name = exercise.name
    if status == NOT_ATTEMPTED:
        return OwnRun.failed(name, status)
    fns = [fn, exercise.library] if exercise.library else [fn]
    link = exercise.link
    link = None if link and world_size % (link.ranks_per_host or 1) else link
    options: dict[str, Any] = {"world_size": world_size, "device": "cpu", "link": link}
    case = exercise.drawn_case(world_size)
    try:
        with undrawn():
            result = run(_spend, fns, exercise.to_run(), case, timeout_s=TIMEOUT_S, **options)
    except (WorkerError, ValueError) as error:
        if status == NOT_YET:
            return OwnRun.failed(name, status)
        first_line = str(error).partition("\n")[0]
        return OwnRun(name, f"{status}, but this run did not finish: {first_line}")
    figures = []
    for whose, spans in zip(("your function", "labkit's"), zip(*result.values)):
        starts_s, ends_s = zip(*spans)
        span = {"start_s": min(starts_s), "end_s": max(ends_s)}
        figures.append(timeline(result.trace, title=f"{name}, {whose}", **span))
    return OwnRun(name, "not right yet." if status == NOT_YET else f"{status}.", *figures)


def _spend(
    comm: Comm, fns: list[Callable], exercise: Exercise, case: Case
) -> list[tuple[float, float]]:
    """On a rank: start and end of each function, in seconds of the trace."""
    recorder, found = comm.session.recorder, []

    def now_s() -> float:
        return recorder.timer.seconds(recorder.timer.mark(), recorder.origin)

    for fn in fns:
        seconds = list[float]()

        @contextmanager
        def noted(seconds: list[float] = seconds) -> Iterator[None]:
            """What is done between messages (copies, additions) is recorded as ``compute``."""
            seconds.append(now_s())
            with comm.span("compute"):
                yield
            seconds.append(now_s())

        # The ranks make their arguments before they start together.
        args = exercise.inputs(comm.rank, case)
        comm.barrier()
        call_once(comm, fn, exercise, args, noted)
        # On a rank whose part the check plays, the function is not called.
        found.append((min(seconds, default=math.inf), max(seconds, default=-math.inf)))
    return found
