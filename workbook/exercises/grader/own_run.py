"""The learner's own run, drawn beside that of labkit's function."""

import html
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from labkit.engine.comm.comm import Comm
from labkit.engine.errors import WorkerError
from labkit.engine.runtime.launch import run
from labkit.engine.runtime.output import undrawn
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
        reason = status if status == NOT_ATTEMPTED else "it did not finish, as the check says"
        return OwnRun(name, f"{reason}, so there is nothing to draw.")

    def __repr__(self) -> str:
        text = f"your run of {self.name}: {self.sentence}"
        if self.figure:
            text += f"\n\n{self.figure!r}"
        return text

    def _repr_html_(self) -> str:
        title = f"<strong>Your run of {html.escape(self.name)}</strong>"
        page = f"<p>{title}: {html.escape(self.sentence)}</p>"
        if self.figure:
            page += self.figure.html()
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
    fns = [fn]
    if exercise.library:
        fns.append(exercise.library)
    link = exercise.link
    if link and world_size % (link.ranks_per_host or 1):
        link = None
    try:
        with undrawn():
            result = run(
                _time_spans,
                fns,
                exercise.to_run(),
                exercise.drawn_case(world_size),
                world_size=world_size,
                device="cpu",
                link=link,
                timeout_s=TIMEOUT_S,
            )
    except (WorkerError, ValueError) as error:
        if status == NOT_YET:
            return OwnRun.failed(name, status)
        first_line = str(error).partition("\n")[0]
        return OwnRun(name, f"{status}, but this run did not finish: {first_line}")
    figures = []
    for author, spans in zip(("your function", "labkit's"), zip(*result.values)):
        starts_s, ends_s = zip(*spans)
        title = f"{name}, {author}"
        figure = timeline(result.trace, title=title, start_s=min(starts_s), end_s=max(ends_s))
        figures.append(figure)
    sentence = "not right yet." if status == NOT_YET else f"{status}."
    return OwnRun(name, sentence, *figures)


def _time_spans(
    comm: Comm, fns: list[Callable], exercise: Exercise, case: Case
) -> list[tuple[float, float]]:
    """Start and end of each function on a rank, in seconds of the trace."""
    recorder = comm.session.recorder
    spans = []

    def now_s() -> float:
        return recorder.timer.seconds(recorder.timer.mark(), recorder.origin)

    for fn in fns:
        seconds = list[float]()

        @contextmanager
        def noted(seconds: list[float] = seconds) -> Iterator[None]:
            """Record the time between messages (copies, additions) as ``compute``."""
            seconds.append(now_s())
            with comm.span("compute"):
                yield
            seconds.append(now_s())

        # The ranks make their arguments before they start together.
        args = exercise.inputs(comm.rank, case)
        comm.barrier()
        call_once(comm, fn, exercise, args, noted)
        # On a rank whose part the check plays, the function is not called.
        spans.append((min(seconds, default=math.inf), max(seconds, default=-math.inf)))
    return spans
