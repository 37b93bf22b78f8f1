"""What is passed, and predictions against reality: ``workbook.progress()``."""

import html
from dataclasses import dataclass

from labkit.units import format_count, format_number, format_value, html_table, text_table
from workbook.notebook import record
from workbook.notebook.pages import Page, workbook_pages
from workbook.notebook.record import Predicted, Record, Tried

# So many of the newest predictions are summed up in a sentence.
LAST = 5


@dataclass(frozen=True)
class Progress:
    """A learner's record beside the pages of the workbook; it shows as tables and sentences.

    Attributes:
        exercises: by page's title and name of the exercise; None for one that has not been tried.
        predictions: (page, prediction), the one that was measured last at the end.
        where: the file, or why there is none.
    """

    exercises: dict[str, dict[str, Tried | None]]
    predictions: list[tuple[str, Predicted]]
    where: str

    @classmethod
    def of(cls, recorded: Record, pages: list[Page], where: str) -> "Progress":
        """Put a record and the pages together; a script's exercise counts for its page."""
        titles = {page.name: f"{page.name[:2]} {page.title}" for page in pages}
        exercises: dict[str, dict[str, Tried | None]] = {
            titles[page.name]: dict.fromkeys(page.exercises) for page in pages
        }
        for page, of_page in recorded.exercises.items():
            for name, one in of_page.items():
                having = [titles[known.name] for known in pages if name in known.exercises]
                title = titles.get(page, page) or next(iter(having), "elsewhere")
                old = exercises.setdefault(title, {}).get(name)
                exercises[title][name] = old if old and old.passed_at else one
        by_page = recorded.predictions.items()
        made = [(page, one) for page, of in by_page for of_key in of.values() for one in of_key]
        measured = [(page, one) for page, one in made if one.measured is not None]
        measured.sort(key=lambda pair: pair[1].measured_at or "")
        return cls(exercises, measured, where)

    def sentences(self) -> list[str]:
        """What is passed in all, and how far the last predictions were off."""
        everything = [one for of_page in self.exercises.values() for one in of_page.values()]
        passed = sum(bool(one and one.passed_at) for one in everything)
        found = [f"{passed} of {format_count(len(everything), 'exercise')} passed."]
        if last := [one.factor for _, one in self.predictions if one.factor is not None][-LAST:]:
            text = f"Your last {format_count(len(last), 'prediction')}: within a factor of "
            found.append(f"{text}{format_number(max(last))} of the measurement.")
        return found

    def tables(self) -> list[list[list[str]]]:
        """Exercises by page, and predictions, the newest last; each begins with its head."""
        rows = [["page", "passed", "exercises"]]
        for title, there in self.exercises.items():
            by_state: dict[str, list[str]] = {}
            for name, one in there.items():
                state = one.status if one else "open"
                if one and not one.passed_at:
                    state += f" ({format_count(one.attempts, 'attempt')})"
                by_state.setdefault(state, []).append(name)
            states = "; ".join(f"{state}: {', '.join(of)}" for state, of in by_state.items())
            passed = sum(bool(one and one.passed_at) for one in there.values())
            rows.append([title, f"{passed} of {len(there)}", states])
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
        text = html.escape(" ".join([*self.sentences(), self.where]))
        return f"{''.join(tables)}<p>{text}</p>"


def progress() -> Progress:
    """What is passed on each page, and the predictions beside what was measured.

    It is kept in a file outside the repository: ``labkit/progress.json`` in ``XDG_DATA_HOME`` or
    ``~/.local/share``; ``LABKIT_PROGRESS`` names another file, or is ``off``.
    """
    path, reason = record.progress_file()
    where = f"Kept in {path}." if path else f"Kept only as long as this process: {reason}."
    return Progress.of(record.read(), workbook_pages(), where)
