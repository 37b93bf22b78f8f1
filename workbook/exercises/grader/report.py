"""The verdict of a check: one short table, as text and as HTML."""

import html
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from labkit.runtime.watch import undrawn
from labkit.units import html_table, text_table
from workbook.exercises.grader.score import Scored
from workbook.exercises.grader.words import Mistake
from workbook.notebook.record import note_verdict

PASSED, NOT_YET, NOT_ATTEMPTED = "passed", "not yet", "not attempted yet"
# The library's or PyTorch's own function was called in place of writing it.
NOT_YOURS = "works, but not yours yet"


@dataclass
class Verdict:
    """How an attempt at an exercise went. Truthy when it passed.

    Attributes:
        name: the exercise.
        status: ``passed``, ``works, but not yours yet`` (an existing function was called),
            ``not yet`` or ``not attempted yet``.
        columns: the world sizes in words, one per column.
        rows: what was judged -> one cell per column.
        notes: mistakes, or sentences that say what is right.
        caption: what the numbers in the table are.
        score: of a puzzle, on the most ranks, beside the best known.
        run_again: (status, P) -> the learner's run, drawn; None if there are no ranks.
        shown: whether the check has just printed it.
    """

    name: str
    status: str
    columns: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)
    notes: list[Mistake | str] = field(default_factory=list)
    caption: str = ""
    score: Scored | None = None
    run_again: Callable[[str, int], Any] | None = field(default=None, repr=False, compare=False)
    shown: bool = field(default=False, repr=False)

    @property
    def passed(self) -> bool:
        return self.status == PASSED

    @property
    def works(self) -> bool:
        """Whether all results are right, be they the learner's work or not."""
        return self.status in (PASSED, NOT_YOURS)

    @property
    def ids(self) -> list[str]:
        """The ids of all mistakes in the notes."""
        return [i for note in self.notes if isinstance(note, Mistake) for i in note.ids]

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        title = f"{self.status}: {self.name}"
        if not self.rows:
            return "\n".join([title, *map(str, self.notes)])
        table = text_table(["", *self.columns], self._table())
        return "\n\n".join([title, table, *filter(None, [self.caption]), *map(str, self.notes)])

    def _repr_html_(self) -> str:
        table = html_table(["", *self.columns], self._table())
        table += f"<p>{html.escape(self.caption)}</p>" if self.caption else ""
        notes = "".join(f"<pre>{html.escape(str(note))}</pre>" for note in self.notes)
        title = f"<p><strong>{self.status}</strong>: {html.escape(self.name)}</p>"
        return title + (table if self.rows else "") + notes

    def _ipython_display_(self) -> None:
        """Show the table, unless the check has just printed it: a cell often ends with a check."""
        from IPython.display import display

        if self.shown:
            self.shown = False
        else:
            data: dict[str, Any] = {"text/plain": repr(self), "text/html": self._repr_html_()}
            display(data, raw=True)

    def _table(self) -> list[list[str]]:
        return [[name, *cells] for name, cells in self.rows.items()]

    def own_run(self, world_size: int = 4) -> Any:
        """Run the function once more and show its timeline beside the target and labkit's.

        Raises:
            ValueError: the exercise is graded without ranks.
        """
        if self.run_again is None:
            raise ValueError(f"{self.name} is graded without ranks, so there is no run to draw")
        return self.run_again(self.status, world_size)


def status_of_right(notes: list[Mistake | str]) -> str:
    """The status where nothing is wrong; a mistake in the notes says whose function it is."""
    return NOT_YOURS if any(isinstance(note, Mistake) for note in notes) else PASSED


@contextmanager
def announces_a_stop(name: str) -> Iterator[None]:
    """Say that a check was stopped (Ctrl-C, the stop button): the program stops, too."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped: {name}\nThe check was stopped, and nothing of it is still running.")
        raise


def told(name: str, judge: Callable[[], Verdict]) -> Verdict:
    """Print and return the verdict of ``judge``, or one that says which error it raised."""
    try:
        with announces_a_stop(name), undrawn():
            verdict = judge()
    except Exception as error:
        note = Mistake("check.broke", error=f"{type(error).__name__}: {error}")
        verdict = Verdict(name, NOT_YET, notes=[note])
    print(verdict)
    verdict.shown = True
    if verdict.status != NOT_ATTEMPTED:
        note_verdict(verdict.name, verdict.status, verdict.passed)
    return verdict
