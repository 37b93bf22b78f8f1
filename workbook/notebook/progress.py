"""What is passed, and predictions against reality: ``workbook.progress()``."""

import html
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from labkit.units import format_count, format_number, format_value, html_table, text_table
from workbook.notebook import record
from workbook.notebook.pages import Page, workbook_pages
from workbook.notebook.record_format import Predicted, Record, Tried
from workbook.notebook.row import PredictionRow

# How many of the newest predictions are compared with as many before them.
LAST = 5
_OPEN = "open"


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

    def passed(self, page: str) -> int:
        """The number of exercises of a page that are passed."""
        return sum(bool(one and one.passed_at) for one in self.exercises[page].values())

    def sentences(self) -> list[str]:
        """What is passed in all, and how predictions develop."""
        total = sum(map(len, self.exercises.values()))
        passed = sum(map(self.passed, self.exercises))
        said = [f"{passed} of {format_count(total, 'exercise')} passed."]
        factors = [one.factor for _, one in self.predictions if one.factor is not None]
        if factors:
            said.append(_development(factors))
        return said

    def exercise_table(self) -> list[list[str]]:
        """The first row is the head: page, passed, exercises."""
        rows = [["page", "passed", "exercises"]]
        for page in self.pages:
            there = self.exercises[page.name]
            by_state: dict[str, list[str]] = {}
            for name, one in there.items():
                by_state.setdefault(_state(one), []).append(name)
            states = "; ".join(f"{state}: {', '.join(of)}" for state, of in by_state.items())
            rows.append([_heading(page), f"{self.passed(page.name)} of {len(there)}", states])
        return rows

    def prediction_table(self) -> list[list[str]]:
        """The first row is the head; the newest prediction is the last row."""
        rows = [["page", "quantity", "prediction", "measured", "measured / prediction"]]
        for page, one in self.predictions:
            cells = PredictionRow(
                one.quantity, one.unit, one.value, one.model, (one.measured or 0.0,)
            ).cells()
            ratio = cells["measured / prediction"]
            rows.append(
                [
                    page,
                    one.quantity,
                    cells["your prediction"],
                    format_value(one.measured or 0.0, one.unit),
                    ratio,
                ]
            )
        return rows

    def to_json(self) -> str:
        """All of it as JSON; an exercise that has not been tried is null."""
        pages = {
            page.name: {
                "title": page.title,
                "exercises": {
                    name: one and asdict(one) for name, one in self.exercises[page.name].items()
                },
            }
            for page in self.pages
        }
        made = [{"page": page, **asdict(one)} for page, one in self.predictions]
        whole = {"where": self.where, "pages": pages, "predictions": made}
        return json.dumps({**whole, "summary": self.sentences()}, indent=1)

    def __repr__(self) -> str:
        parts = [text_table(heads, rows) for heads, *rows in self._tables()]
        return "\n\n".join([*parts, "\n".join([*self.sentences(), self.where])])

    def _repr_html_(self) -> str:
        tables = [html_table(heads, rows, of_words=True) for heads, *rows in self._tables()]
        said = (" ".join(self.sentences()), self.where)
        return "".join([*tables, *(f"<p>{html.escape(text)}</p>" for text in said)])

    def _tables(self) -> list[list[list[str]]]:
        return [self.exercise_table(), *([self.prediction_table()] if self.predictions else [])]


def progress() -> Progress:
    """What is passed on each page, and the predictions beside what was measured.

    It is kept in a file outside the repository: ``labkit/progress.json`` in ``XDG_DATA_HOME`` or
    ``~/.local/share``; ``LABKIT_PROGRESS`` names another file, or is ``off``.
    """
    path, reason = record.progress_file()
    where = f"Kept in {path}." if path else f"Kept only as long as this process: {reason}."
    return collected(record.store().read(), workbook_pages(), where)


def reset() -> str:
    """Begin again; the sentence says where the old record is.

    Raises:
        ValueError: nothing is recorded here.
        OSError: the old file cannot be moved.
    """
    path, reason = record.progress_file()
    if path is None:
        raise ValueError(f"there is no progress to reset: {reason}")
    moved = record.store().reset()
    return f"The old progress is kept in {moved}." if moved else f"There is none yet in {path}."


def collected(recorded: Record, pages: list[Page], where: str) -> Progress:
    """Put a record and the pages together."""
    exercises: dict[str, dict[str, Tried | None]] = {
        page.name: dict.fromkeys(page.exercises) for page in pages
    }
    for page, name, one in _by_page(recorded, pages):
        exercises.setdefault(page, {})[name] = _better(exercises.get(page, {}).get(name), one)
    others = [Page(name, name, ()) for name in exercises if name not in {p.name for p in pages}]
    measured = [
        (page, one)
        for page, of_page in recorded.predictions.items()
        for all_of_it in of_page.values()
        for one in all_of_it
        if one.measured is not None
    ]
    measured.sort(key=lambda pair: pair[1].measured_at or "")
    return Progress([*pages, *others], exercises, measured, where)


def _by_page(recorded: Record, pages: list[Page]) -> Iterator[tuple[str, str, Tried]]:
    """(page, exercise, attempts); a script's exercise counts for the page that has it."""
    for page, of_page in recorded.exercises.items():
        for name, one in of_page.items():
            having = [known.name for known in pages if name in known.exercises]
            yield (having[0] if not page and having else page), name, one


def _better(one: Tried | None, other: Tried) -> Tried:
    return one if one and one.passed_at and not other.passed_at else other


def _state(one: Tried | None) -> str:
    if one is None:
        return _OPEN
    attempts = "" if one.passed_at else f" ({format_count(one.attempts, 'attempt')})"
    return f"{one.status}{attempts}"


def _heading(page: Page) -> str:
    if not page.name:
        return "elsewhere"
    return page.name if page.title == page.name else f"{page.name[:2]} {page.title}"


def _development(factors: list[float]) -> str:
    last, before = factors[-LAST:], factors[-2 * LAST : -LAST]
    which = "last prediction was" if len(last) == 1 else f"last {len(last)} predictions were"
    text = f"Your {which} within a factor of {format_number(max(last))} of the measurement"
    if len(before) < LAST:
        return f"{text}."
    return f"{text}; of the {LAST} before, {format_number(max(before))}."
