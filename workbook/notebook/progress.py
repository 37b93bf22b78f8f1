"""What is passed, and predictions against reality: ``workbook.progress()``."""

import html
from dataclasses import dataclass

from labkit.units import format_count, format_number, format_value, html_table, text_table
from workbook.notebook import record
from workbook.notebook.pages import Page, workbook_pages
from workbook.notebook.record import Predicted, Record, Tried

# How many of the newest predictions are compared with as many before them.
LAST = 5


@dataclass(frozen=True)
class Progress:
    """A learner's record beside the pages of the workbook.

    Attributes:
        pages: those of the workbook, then others on which something was tried.
        exercises: by page and name; None for one that has not been tried.
        predictions: (page, prediction), the one that was measured last at the end; without those
            that have not been measured.
        where: the file, or why there is none.
    """

    pages: list[Page]
    exercises: dict[str, dict[str, Tried | None]]
    predictions: list[tuple[str, Predicted]]
    where: str

    @classmethod
    def of(cls, recorded: Record, pages: list[Page], where: str) -> "Progress":
        """Put a record and the pages together; a script's exercise counts for its page."""
        exercises: dict[str, dict[str, Tried | None]] = {
            page.name: dict.fromkeys(page.exercises) for page in pages
        }
        for page, of_page in recorded.exercises.items():
            for name, one in of_page.items():
                having = [known.name for known in pages if name in known.exercises]
                there = exercises.setdefault(page or (having or [""])[0], {})
                old = there.get(name)
                there[name] = old if old and old.passed_at and not one.passed_at else one
        others = [Page(name, name, ()) for name in list(exercises)[len(pages) :]]
        measured = [
            (page, one)
            for page, of_page in recorded.predictions.items()
            for of_key in of_page.values()
            for one in of_key
            if one.measured is not None
        ]
        measured.sort(key=lambda pair: pair[1].measured_at or "")
        return cls([*pages, *others], exercises, measured, where)

    def passed(self, page: str) -> int:
        """The number of exercises of a page that are passed."""
        return sum(bool(one and one.passed_at) for one in self.exercises[page].values())

    def sentences(self) -> list[str]:
        """What is passed in all, and how predictions develop."""
        total = sum(map(len, self.exercises.values()))
        passed = sum(map(self.passed, self.exercises))
        found = [f"{passed} of {format_count(total, 'exercise')} passed."]
        factors = [one.factor for _, one in self.predictions if one.factor is not None]
        if factors:
            last, before = factors[-LAST:], factors[-2 * LAST : -LAST]
            text = f"Your last {format_count(len(last), 'prediction')}: within a factor of "
            text += f"{format_number(max(last))} of the measurement"
            if len(before) == LAST:
                text += f"; of the {LAST} before, {format_number(max(before))}"
            found.append(f"{text}.")
        return found

    def tables(self) -> list[list[list[str]]]:
        """Exercises by page, and predictions, the newest last; each begins with its head."""
        rows = [["page", "passed", "exercises"]]
        for page in self.pages:
            there = self.exercises[page.name]
            by_state: dict[str, list[str]] = {}
            for name, one in there.items():
                state = one.status if one else "open"
                if one and not one.passed_at:
                    state += f" ({format_count(one.attempts, 'attempt')})"
                by_state.setdefault(state, []).append(name)
            states = "; ".join(f"{state}: {', '.join(of)}" for state, of in by_state.items())
            heading = page.name or "elsewhere"
            if page.title != page.name:
                heading = f"{page.name[:2]} {page.title}"
            rows.append([heading, f"{self.passed(page.name)} of {len(there)}", states])
        made = [["page", "quantity", "prediction", "measured", "measured / prediction"]]
        for page, one in self.predictions:
            measured = one.measured or 0.0
            ratio = f"{format_number(measured / one.value)} ×" if one.value else "–"
            shown = [format_value(number, one.unit) for number in (one.value, measured)]
            made.append([page, one.quantity, *shown, ratio])
        return [rows, made] if self.predictions else [rows]

    def __repr__(self) -> str:
        parts = [text_table(heads, rows) for heads, *rows in self.tables()]
        return "\n\n".join([*parts, "\n".join([*self.sentences(), self.where])])

    def _repr_html_(self) -> str:
        tables = [html_table(heads, rows, of_words=True) for heads, *rows in self.tables()]
        lines = (" ".join(self.sentences()), self.where)
        return "".join([*tables, *(f"<p>{html.escape(text)}</p>" for text in lines)])


def progress() -> Progress:
    """What is passed on each page, and the predictions beside what was measured.

    It is kept in a file outside the repository: ``labkit/progress.json`` in ``XDG_DATA_HOME`` or
    ``~/.local/share``; ``LABKIT_PROGRESS`` names another file, or is ``off``.
    """
    path, reason = record.progress_file()
    where = f"Kept in {path}." if path else f"Kept only as long as this process: {reason}."
    return Progress.of(record.read(), workbook_pages(), where)
