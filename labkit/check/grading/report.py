"""The verdict of a check: one short table, as text and as HTML."""

import html
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labkit.check.grading.words import Mistake
from labkit.units import html_table

PASSED, NOT_YET, NOT_ATTEMPTED = "passed", "not yet", "not attempted yet"

# A stub is told by this line, not by the type: PyTorch raises NotImplementedError, too.
STUB = "raise NotImplementedError"


@dataclass
class Verdict:
    """How an attempt at an exercise went. Truthy when it passed.

    Attributes:
        name: the exercise.
        status: ``passed``, ``not yet`` or ``not attempted yet``.
        columns: the world sizes in words, one per column.
        rows: what was judged -> one cell per column.
        notes: mistakes, or sentences that say what is right.
        caption: what the numbers in the table are.
        shown: whether the check has just printed it.
    """

    name: str
    status: str
    columns: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)
    notes: list[Mistake | str] = field(default_factory=list)
    caption: str = ""
    shown: bool = field(default=False, repr=False)

    @property
    def passed(self) -> bool:
        return self.status == PASSED

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
        table = "\n".join(_aligned([["", *self.columns], *self._table()]))
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


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ("   ".join(cell.ljust(w) for cell, w in zip(row, widths)) for row in table)
    return [line.rstrip() for line in lines]


def told(name: str, judge: Callable[[], Verdict]) -> Verdict:
    """Print and return the verdict of ``judge``, or one that says which error it raised."""
    try:
        verdict = judge()
    except Exception as error:
        note = Mistake("check.broke", error=f"{type(error).__name__}: {error}")
        verdict = Verdict(name, NOT_YET, notes=[note])
    print(verdict)
    verdict.shown = True
    return verdict
