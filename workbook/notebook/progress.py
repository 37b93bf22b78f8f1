"""What is passed, and predictions against reality: ``workbook.progress()``."""

import html
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.units import format_count, format_number, format_value, html_table, text_table
from workbook.notebook import record
from workbook.notebook.pages import Page, workbook_pages
from workbook.notebook.record import Predicted, Record, Tried

_HEADS = ["page", "quantity", "prediction", "measured", "× prediction"]


@dataclass(frozen=True)
class Progress:
    """A learner's record beside the pages of the workbook; it shows as a list, a table, sentences.

    Attributes:
        pages: those of the workbook, and behind them one for each other place with exercises.
        exercises: by name.
        predictions: (page, prediction), the one that was measured last at the end.
        where: the file, or why there is none.
    """

    pages: list[Page]
    exercises: dict[str, Tried]
    predictions: list[tuple[str, Predicted]]
    where: str

    @classmethod
    def of(cls, recorded: Record, pages: list[Page], where: str) -> "Progress":
        """Put a record and the pages together.

        An exercise counts for the page that has it now: it may have been passed in a script, or
        on the page where it was before.
        """
        found: dict[str, Tried] = {}
        others = []
        for place, of_place in recorded.exercises.items():
            for name, one in of_place.items():
                if name not in found or one.passed_at:
                    found[name] = one
            left = [name for name in of_place if not any(name in p.exercises for p in pages)]
            others += [Page("", place or "elsewhere", {n: n for n in left})] if left else []
        by_page = recorded.predictions.items()
        made = [(page, one) for page, of in by_page for of_key in of.values() for one in of_key]
        measured = [(page, one) for page, one in made if one.measured is not None]
        measured.sort(key=lambda pair: pair[1].measured_at or "")
        return cls([*pages, *others], found, measured, where)

    def sentences(self) -> list[str]:
        """What is passed in all, and how far the last predictions were off."""
        names = [name for page in self.pages for name in page.exercises]
        found = [f"{self._passed(names)} of {format_count(len(names), 'exercise')} passed."]
        if last := [one.factor for _, one in self.predictions if one.factor is not None][-5:]:
            text = f"Your last {format_count(len(last), 'prediction')}: within a factor of "
            found.append(f"{text}{format_number(max(last))} of the measurement.")
        return [*found, self.where]

    def rows(self) -> list[list[str]]:
        """The predictions beside what was measured, the newest last."""
        rows = []
        for page, one in self.predictions:
            measured = one.measured or 0.0
            ratio = format_number(measured / one.value) if one.value else "–"
            shown = [format_value(number, one.unit) for number in (one.value, measured)]
            rows.append([page, one.quantity, *shown, ratio])
        return rows

    def _passed(self, names: Iterable[str]) -> int:
        return sum(bool(self.exercises[n].passed_at) for n in names if n in self.exercises)

    def _head(self, page: Page) -> str:
        passed = f"{self._passed(page.exercises)} of {len(page.exercises)} passed"
        return f"{page.name[:2]} {page.title}: {passed}".strip()

    def _state(self, name: str) -> str:
        """The mark behind an exercise."""
        if (one := self.exercises.get(name)) is None:
            return ""
        attempts = format_count(one.attempts, "attempt")
        return " ✓" if one.passed_at else f" ({one.status}, {attempts})"

    def __repr__(self) -> str:
        lines = []
        for page in self.pages:
            lines.append(self._head(page))
            states = ((title, self._state(name)) for name, title in page.exercises.items())
            lines += [f"    {title}{state}" for title, state in states if state]
        table = [text_table(_HEADS, self.rows())] if self.predictions else []
        return "\n\n".join(["\n".join(lines), *table, "\n".join(self.sentences())])

    def _repr_html_(self) -> str:
        """With a link to each exercise; those of a page are in a fold."""
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
        table = html_table(_HEADS, self.rows()) if self.predictions else ""
        return f"{''.join(parts)}{table}<p>{html.escape(' '.join(self.sentences()))}</p>"


def progress() -> Progress:
    """What is passed on each page, and the predictions beside what was measured.

    It is kept in a file outside the repository: ``labkit/progress.json`` in ``XDG_DATA_HOME`` or
    ``~/.local/share``; ``LABKIT_PROGRESS`` names another file, or is ``off``.
    """
    path, reason = record.progress_file()
    where = f"Kept in {path}." if path else f"Kept only as long as this process: {reason}."
    return Progress.of(record.read(), workbook_pages(), where)
