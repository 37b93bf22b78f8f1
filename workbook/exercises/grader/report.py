"""The verdict of a check: a card in a notebook, and the same as text."""

import html
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labkit.engine.runtime.output import is_live, kernel, undrawn
from labkit.units import html_table, text_table
from workbook.notebook.record import note_verdict

PASSED, NOT_YET, NOT_ATTEMPTED = "passed", "not yet", "not attempted yet"
_COLORS = {PASSED: "#2da44e", NOT_YET: "#d1242f", NOT_ATTEMPTED: "#6e7781"}
# JupyterLab would break lines in the middle of a word.
_WRAPPED = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere"
# Longer stories are folded.
_MOST_LINES = 6


@dataclass
class Verdict:
    """Status, notes and table of an attempt at an exercise. Truthy when it passed."""

    name: str
    status: str
    # The world sizes in words, and what was judged -> one cell for each of them.
    columns: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)
    # The first thing that is wrong, or what is right; and what the numbers in the table are.
    notes: list[str] = field(default_factory=list)
    caption: str = ""
    # (status, P) -> the learner's run, drawn; None if there are no ranks.
    run_again: Callable[[str, int], Any] | None = field(default=None, repr=False, compare=False)
    # Whether the check has just shown it.
    shown: bool = field(default=False, repr=False)

    @property
    def passed(self) -> bool:
        return self.status == PASSED

    def __bool__(self) -> bool:
        return self.passed

    def _around_the_table(self) -> tuple[list[list[str]], list[str]]:
        """The table, and the sentences under it."""
        table = [[name, *cells] for name, cells in self.rows.items()]
        sentences = []
        if self.caption:
            sentences.append(self.caption)
        if self.status == NOT_YET and "Next step" not in "".join(self.notes):
            sentences.append("Next: mend this, and run the check again.")
        return table, sentences

    def __repr__(self) -> str:
        table, sentences = self._around_the_table()
        paragraphs = [f"{self.status}: {self.name}"]
        for note in self.notes:
            paragraphs.append("\n".join(map(_filled, note.split("\n"))))
        if table:
            paragraphs.append(text_table(["", *self.columns], table))
        return "\n\n".join(paragraphs + sentences)

    def _repr_html_(self) -> str:
        """The same in a page; the lines of a long note are in a fold."""
        table, sentences = self._around_the_table()
        mark = {PASSED: "✓ ", NOT_YET: "✗ "}.get(self.status, "")
        body = f"<p><strong>{mark}{self.status}</strong>: {html.escape(self.name)}</p>"
        for note in self.notes:
            first, *rest = html.escape(note).split("\n")
            body += f"<p>{first}</p>{_preformatted(rest[:_MOST_LINES])}"
            if folded := _preformatted(rest[_MOST_LINES:]):
                body += f"<details><summary>more</summary>{folded}</details>"
        if table:
            body += html_table(["", *self.columns], table)
        for sentence in sentences:
            body += f"<p>{html.escape(sentence)}</p>"
        style = f"border-left: 6px solid {_COLORS[self.status]}; padding: 0 1em"
        return f'<div style="{style}">{body}</div>'

    def _ipython_display_(self) -> None:
        """Show the card, unless the check has just shown it: a cell often ends with a check."""
        from IPython.display import display

        if not self.shown:
            display(self.as_data(), raw=True)
        self.shown = False

    def as_data(self) -> dict[str, str]:
        """The verdict as text and as a card, by MIME type."""
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    def own_run(self, world_size: int = 4) -> Any:
        """Run the function once more and show its timeline beside labkit's."""
        if self.run_again is None:
            raise ValueError(f"{self.name} is graded without ranks, so there is no run to draw")
        return self.run_again(self.status, world_size)


def _filled(line: str) -> str:
    """A printed line, broken at spaces; the row of a table as it is."""
    if "  " in line.strip():
        return line
    return textwrap.fill(line, 96, break_long_words=False, break_on_hyphens=False)


def _preformatted(lines: list[str]) -> str:
    text = "\n".join(lines)
    return f"<pre style='{_WRAPPED}'>{text}</pre>" if text else ""


def show_verdict(name: str, judge: Callable[[], Verdict]) -> Verdict:
    """Show and return the verdict of ``judge``, or one that says which error it raised."""
    handle = None
    if kernel() is not None and is_live():
        # Judging may take seconds: the page says at once that it has begun.
        from IPython.display import display

        handle = display({"text/plain": f"checking {name} ..."}, raw=True, display_id=True)
    try:
        with undrawn():
            verdict = judge()
    except KeyboardInterrupt:  # Ctrl-C, or the stop button: the program stops, too
        print(f"stopped: {name}\nThe check was stopped, and nothing of it is still running.")
        raise
    except Exception as error:
        note = f"the check itself failed with {type(error).__name__}: {error}"
        verdict = Verdict(name, NOT_YET, notes=[note])
    if handle is not None:
        handle.update(verdict.as_data(), raw=True)
    elif kernel() is not None and verdict.status != NOT_ATTEMPTED:
        verdict._ipython_display_()
    else:
        print(verdict)
    verdict.shown = True
    if verdict.status != NOT_ATTEMPTED:
        note_verdict(verdict.name, verdict.status, verdict.passed)
    return verdict
