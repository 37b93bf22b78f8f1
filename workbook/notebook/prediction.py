"""A prediction of one quantity: open until it is measured, then locked."""

import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Protocol

from labkit.units import format_value
from workbook.notebook import record
from workbook.notebook.pages import current_page
from workbook.notebook.record_format import Predicted, entry
from workbook.notebook.row import PredictionRow, make_row, number_or_none
from workbook.notebook.typed import parse_typed, scale_between


class Form(Protocol):
    """What shows a prediction in a notebook."""

    def refresh(self) -> None: ...
    def _repr_mimebundle_(self) -> dict[str, Any] | None: ...


class Prediction:
    """What ``workbook.predict`` returns: a number in ``unit``, or none yet.

    Attributes:
        quantity, unit: as in ``predict``.
        value: the number; None if there is none.
        locked_at: when it was first measured, as ISO 8601; None if it has not been.
        form: shows it in a notebook; None elsewhere.
        row: beside the model and the measurement; None before it is measured.
    """

    def __init__(self, quantity: str, unit: str, key: str):
        self.quantity, self.unit = quantity, unit
        self.value: float | None = None
        self.locked_at: str | None = None
        self.row: PredictionRow | None = None
        self.form: Form | None = None
        self._key, self._page = key, current_page()
        self._again = self._shown = False
        self._entered_at = ""
        self._restore()

    def _restore(self) -> None:
        """Continue with the newest prediction that is recorded, if there is one."""
        recorded = record.predictions(self._page, self._key)
        if not recorded:
            return
        last = recorded[-1]
        try:
            scale = scale_between(last.unit, self.unit)
        except ValueError:  # the page asks for something else since
            self._again = True
            return
        self.value, self.locked_at = last.value * scale, last.measured_at
        self._entered_at = last.predicted_at
        if last.measured is not None:
            model = None if last.model is None else last.model * scale
            self.row = make_row(self.quantity, self.unit, self.value, model, last.measured * scale)

    def enter(self, value: float | str | None) -> None:
        """Make or change the prediction; an empty text or None takes it back.

        Raises:
            ValueError: it is locked, or ``value`` is not a number in a fitting unit.
        """
        if self.locked_at is not None:
            raise ValueError(str(self))
        if isinstance(value, str):
            number = parse_typed(value, self.unit) if value.strip() else None
        else:
            number = number_or_none(value, "value", self.unit)
        if number is not None and not math.isfinite(number):
            raise ValueError(f"a prediction must be a finite number, got {value}")
        self.value, self._entered_at = number, record.now()
        record.note_prediction(self._page, self._key, self._entry(), self._again)
        self._refresh()

    def measured(
        self, measured: float | Iterable[float], model: float | None = None
    ) -> PredictionRow:
        """Lock the prediction, and return it beside the model and the measurement.

        Args:
            measured: a number, or the list of repeats, in ``unit``.
            model: what the formula gives; None without a formula.

        Raises:
            ValueError: a value that is not a number, or no measurement.
        """
        self.row = make_row(self.quantity, self.unit, self.value, model, measured)
        self.locked_at = self.locked_at or record.now()
        if made := self._entry():
            row = self.row
            record.note_row(self._page, self._key, made, row.measured, row.model)
        self._refresh()
        return self.row

    def again(self, value: float | str | None = None) -> None:
        """Begin a new prediction; the one before stays recorded."""
        self._again = self._again or self.value is not None
        self.value = self.locked_at = self.row = None
        self._refresh()
        if value is not None:
            self.enter(value)

    @property
    def title(self) -> str:
        """What is asked: a question as it is, or ``Your prediction of`` the quantity."""
        is_question = self.quantity.rstrip().endswith("?")
        return self.quantity if is_question else f"Your prediction of {self.quantity}"

    @property
    def text(self) -> str:
        """The number with its unit in a readable scale; empty if there is none."""
        return "" if self.value is None else format_value(self.value, self.unit)

    @property
    def since(self) -> str:
        """When it was locked, in this machine's time zone."""
        at = datetime.fromisoformat(self.locked_at or record.now()).astimezone()
        return f"{at:%Y-%m-%d %H:%M}"

    def __repr__(self) -> str:
        begin = self.title if self.title.endswith("?") else f"{self.title}:"
        if self.locked_at is None:
            return f"{begin} {self.text or f'none yet, in {self.unit}'}"
        locked = f"locked since it was measured, {self.since}"
        return f"{begin} {self.text or 'none'}, {locked}; .again(value) makes a new one"

    def show(self) -> None:
        """Show the form, or a line of text where there is none."""
        if self.form is None:
            print(self)
        else:
            from IPython.display import display

            display({**(self.form._repr_mimebundle_() or {}), "text/plain": repr(self)}, raw=True)
        self._shown = True

    def _ipython_display_(self) -> None:
        """Show it, unless ``predict`` has just done so: a cell often ends with the call."""
        if not self._shown:
            self.show()
        self._shown = False

    def _entry(self) -> Predicted | None:
        return entry(self.quantity, self.unit, self.value, self._entered_at)

    def _refresh(self) -> None:
        if self.form is not None:
            self.form.refresh()
