"""Exercises that are passed, and predictions against reality: ``workbook.progress()``."""

import html
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.units import format_count, format_number, format_value, html_table, text_table
from workbook.notebook import record
from workbook.notebook.pages import SHORT_PATH, Page, workbook_pages
from workbook.notebook.record import Predicted, Record, Tried

_HEADS = ["page", "quantity", "prediction", "measured", "× prediction"]


@dataclass(frozen=True)
class Progress:
    """A learner's record beside the pages of the workbook; it shows as a list, a table, sentences.

    Attributes:
        pages: those of the workbook, and behind them one for each other place with exercises.
        exercises: by name.
        predictions: (page, prediction), the one that was measured last at the end.
        file_words: where it is kept, or why it is not.
    """

    pages: list[Page]
    exercises: dict[str, Tried]
    predictions: list[tuple[str, Predicted]]
    file_words: str

    @classmethod
    def of(cls, recorded: Record, pages: list[Page], file_words: str) -> "Progress":
        """Put a record and the pages together.

        An exercise counts for the page that has it now: it may have been passed in a script, or
        on the page where it was before.
        """
        exercises: dict[str, Tried] = {}
        on_pages: set[str] = set()
        for known_page in pages:
            on_pages.update(known_page.exercises)
        pages = list(pages)
        for page, attempts in recorded.exercises.items():
            for name, tried in attempts.items():
                if name not in exercises or tried.passed_at:
                    exercises[name] = tried
            names = [name for name in attempts if name not in on_pages]
            if names:
                pages.append(Page("", page or "elsewhere", dict(zip(names, names))))
        measured = []
        for page, predictions_by_key in recorded.predictions.items():
            for prediction in itertools.chain(*predictions_by_key.values()):
                if prediction.measured is not None:
                    measured.append((page, prediction))
        measured.sort(key=lambda pair: pair[1].measured_at or "")
        return cls(pages, exercises, measured, file_words)

    def sentences(self) -> list[str]:
        """Sentences: how much is passed, how far off the last predictions were, the file."""
        names: list[str] = []
        for page in self.pages:
            names += page.exercises
        sentences = [f"{self._passed(names)} of {format_count(len(names), 'exercise')} passed."]
        choices = [page.first_choice for page in self.pages if page.name in SHORT_PATH]
        if choices:
            passed = f"{self._passed(choices)} of the {len(choices)}"
            sentences.append(f"On the short path (•), {passed} to do first are passed.")
        factors = [made.factor for _, made in self.predictions if made.factor is not None]
        if factors:
            text = (
                f"Your last {format_count(len(factors[-5:]), 'prediction')}: within a factor of "
            )
            sentences.append(f"{text}{format_number(max(factors[-5:]))} of the measurement.")
        return [*sentences, self.file_words]

    def rows(self) -> list[list[str]]:
        """The predictions beside what was measured, the newest last."""
        rows = []
        for page, made in self.predictions:
            measured = made.measured or 0.0
            ratio = "–"
            if made.value:
                ratio = format_number(measured / made.value)
            predicted_text = format_value(made.value, made.unit)
            measured_text = format_value(measured, made.unit)
            rows.append([page, made.quantity, predicted_text, measured_text, ratio])
        return rows

    def _passed(self, names: Iterable[str]) -> int:
        passed = {name for name, tried in self.exercises.items() if tried.passed_at}
        return sum(name in passed for name in names)

    def _head(self, page: Page) -> str:
        passed = f"{self._passed(page.exercises)} of {len(page.exercises)} passed"
        if page.name in SHORT_PATH:
            passed += " •"
        return f"{page.name[:2]} {page.title}: {passed}".strip()

    def _state(self, name: str) -> str:
        """The mark behind an exercise."""
        tried = self.exercises.get(name)
        if tried is None:
            return ""
        if tried.passed_at:
            return " ✓"
        return f" ({tried.status}, {format_count(tried.attempts, 'attempt')})"

    def __repr__(self) -> str:
        lines = []
        for page in self.pages:
            lines.append(self._head(page))
            for name, title in page.exercises.items():
                if self._state(name):
                    lines.append(f"    {title}{self._state(name)}")
        parts = ["\n".join(lines), "\n".join(self.sentences())]
        if self.predictions:
            parts.insert(1, text_table(_HEADS, self.rows()))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        """The progress with a link to each exercise; those of a page are in a fold."""
        parts = []
        for page in self.pages:
            items = []
            for name, title in page.exercises.items():
                text = html.escape(title)
                if page.name:
                    target = html.escape(f"{page.name}.ipynb#{title.replace(' ', '-')}")
                    text = f'<a href="{target}">{text}</a>'
                items.append(f"<li>{text}{html.escape(self._state(name))}</li>")
            head = f"<summary>{html.escape(self._head(page))}</summary>"
            parts.append(f"<details>{head}<ul>{''.join(items)}</ul></details>")
        if self.predictions:
            parts.append(html_table(_HEADS, self.rows()))
        return f"{''.join(parts)}<p>{html.escape(' '.join(self.sentences()))}</p>"


def progress() -> Progress:
    """Show what is passed on each page, and the predictions beside what was measured.

    It is kept in a file outside the repository: ``labkit/progress.json`` in ``XDG_DATA_HOME`` or
    ``~/.local/share``; ``LABKIT_PROGRESS`` names another file, or is ``off``.
    """
    path, reason = record.progress_file()
    file_words = f"Kept only as long as this process: {reason}."
    if path:
        file_words = f"Kept in {path}."
    return Progress.of(record.read(), workbook_pages(), file_words)
