"""The verdict of a check: a card in a notebook, and the same as text."""

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.runtime.output import kernel, undrawn
from labkit.units import html_table, text_table
from workbook.notebook.record import note_verdict

PASSED, NOT_YET, NOT_ATTEMPTED = "passed", "not yet", "not attempted yet"
# The library's or PyTorch's own function was called in place of writing it.
NOT_YOURS = "works, but not yours yet"
CALLS_LIBRARY = (
    "it works, and it is not yours yet: the function calls {name}, which already does what this "
    "exercise asks for. Write it yourself"
)
_COLOURS = {PASSED: "#1a7f37", NOT_YOURS: "#9a6700", NOT_YET: "#b42318", NOT_ATTEMPTED: "#57606a"}
# Longer stories are folded.
_MOST_LINES = 6


@dataclass
class Verdict:
    """How an attempt at an exercise went. Truthy when it passed.

    Attributes:
        name: the exercise.
        status: ``passed``, ``works, but not yours yet`` (an existing function was called),
            ``not yet`` or ``not attempted yet``.
        columns: the world sizes in words, one per column.
        rows: what was judged -> one cell per column; ``caption`` says what the numbers are.
        notes: the first thing that is wrong; or what is right.
        run_again: (status, P) -> the learner's run, drawn; None if there are no ranks.
        shown: whether the check has just shown it.
    """

    name: str
    status: str
    columns: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    caption: str = ""
    run_again: Callable[[str, int], Any] | None = field(default=None, repr=False, compare=False)
    shown: bool = field(default=False, repr=False)

    @property
    def passed(self) -> bool:
        return self.status == PASSED

    @property
    def works(self) -> bool:
        """Whether all results are right, be they the learner's work or not."""
        return self.status in (PASSED, NOT_YOURS)

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        title = f"{self.status}: {self.name}"
        return card_text(title, self.notes, self.columns, self.rows, self.caption, self._next)

    def _repr_html_(self) -> str:
        colour = _COLOURS[self.status]
        title = f'<strong style="color: {colour}">{self.status}</strong>: {html.escape(self.name)}'
        ends = self.caption, self._next
        body = card_html(title, self.notes, self.columns, self.rows, *ends)
        style = f"border-left: 4px solid {colour}; padding: 0 1em; overflow-wrap: break-word"
        return f'<div style="{style}">{body}</div>'

    @property
    def _next(self) -> str:
        says_so = self.status != NOT_YET or "Next step" in "".join(self.notes)
        return "" if says_so else "Next: mend this, and run the check again."

    def _ipython_display_(self) -> None:
        """Show the card, unless the check has just shown it: a cell often ends with a check."""
        from IPython.display import display

        if self.shown:
            self.shown = False
        else:
            data: dict[str, Any] = {"text/plain": repr(self), "text/html": self._repr_html_()}
            display(data, raw=True)

    def own_run(self, world_size: int = 4) -> Any:
        """Run the function once more and show its timeline beside the target and labkit's.

        Raises:
            ValueError: the exercise is graded without ranks.
        """
        if self.run_again is None:
            raise ValueError(f"{self.name} is graded without ranks, so there is no run to draw")
        return self.run_again(self.status, world_size)


def card_text(
    title: str, notes: list[str], columns: list[str], rows: Mapping[str, list[str]], *ends: str
) -> str:
    """Sentences above a table, and under it; without empty ones."""
    table = text_table(["", *columns], [[name, *cells] for name, cells in rows.items()])
    parts = [title, *notes, table if rows else "", *ends]
    return "\n\n".join(part for part in parts if part)


def card_html(
    title: str, notes: list[str], columns: list[str], rows: Mapping[str, list[str]], *ends: str
) -> str:
    """The same in a page; ``title`` is HTML. The lines of a long note are in a fold."""
    body = f"<p>{title}</p>"
    for note in notes:
        first, *rest = html.escape(note).split("\n")
        lines = "<pre style='white-space: pre-wrap'>{}</pre>"
        shown, folded = "\n".join(rest[:_MOST_LINES]), "\n".join(rest[_MOST_LINES:])
        body += f"<p>{first}</p>" + (lines.format(shown) if rest else "")
        if folded:
            body += f"<details><summary>more</summary>{lines.format(folded)}</details>"
    if rows:
        body += html_table(["", *columns], [[name, *cells] for name, cells in rows.items()])
    return body + "".join(f"<p>{html.escape(end)}</p>" for end in ends if end)


def told(name: str, judge: Callable[[], Verdict]) -> Verdict:
    """Show and return the verdict of ``judge``, or one that says which error it raised."""
    try:
        with undrawn():
            verdict = judge()
    except KeyboardInterrupt:  # Ctrl-C, or the stop button: the program stops, too
        print(f"stopped: {name}\nThe check was stopped, and nothing of it is still running.")
        raise
    except Exception as error:
        note = f"the check itself failed with {type(error).__name__}: {error}"
        verdict = Verdict(name, NOT_YET, notes=[note])
    a_card = kernel() is not None and verdict.status != NOT_ATTEMPTED
    verdict._ipython_display_() if a_card else print(verdict)
    verdict.shown = True
    if verdict.status != NOT_ATTEMPTED:
        note_verdict(verdict.name, verdict.status, verdict.passed)
    return verdict
