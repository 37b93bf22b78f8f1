"""Predict, run, explain: a prediction is open until its first measurement, which locks it."""

import math
import os
import statistics
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from labkit.engine.runtime.output import kernel
from labkit.units import as_repeats, format_value
from workbook.notebook import record
from workbook.notebook.pages import current_page
from workbook.notebook.record import Predicted
from workbook.notebook.row import PredictionRow
from workbook.notebook.typed import parse_typed


def predict(
    quantity: str, unit: str, *, value: float | str | None = None, id: str | None = None
) -> "Prediction":
    """Ask for a prediction of one quantity, in a notebook by a field, elsewhere by ``value``.

    Give the result to ``predict_row`` in the cell that measures: from then on it is locked, also
    after a restart of the kernel.

    Args:
        quantity: what it is, for example ``time of one all-reduce``.
        unit: of the number, for example ``s``; the reader may type another unit of the same kind.
        value: the prediction, as a number in ``unit`` or as it would be typed (``"1.5 ms"``).
        id: a name that is unique on the page, where two predictions have the same quantity.

    Raises:
        ValueError: ``value`` is not a number in such a unit.
    """
    prediction = Prediction(quantity, unit, str(id or quantity))
    if value is not None and prediction.locked_at is None:
        prediction.enter(value)
    # A page that is compared with its text shows text.
    if os.environ.get("LABKIT_LIVE") == "0" or kernel() is None:
        print(prediction)
        return prediction
    from IPython.display import display

    from workbook.notebook.form import PredictionForm

    prediction.form = PredictionForm(prediction)
    display(prediction.form)
    return prediction


def predict_row(
    quantity: str,
    unit: str,
    prediction: "Prediction | float | None",
    model: float | None,
    measured: float | Iterable[float],
) -> PredictionRow:
    """Put prediction, formula and measurement of one quantity into one table row.

    Args:
        quantity, unit: as in ``predict``; ``bytes`` and ``s`` are scaled when shown (MiB, ms).
        prediction: what ``predict`` has returned, which this locks; or a number.
        model: what the formula gives; None without a formula.
        measured: a number, or the list of repeats.

    Raises:
        ValueError: a value that is not a number, no measurement, or a prediction in another unit.
    """
    repeats = tuple(as_repeats(measured))
    if isinstance(prediction, Prediction):
        if unit != prediction.unit:
            raise ValueError(f"the prediction is in {prediction.unit}, give the row in it, too")
        prediction.measured(statistics.median(repeats), model)
        prediction = prediction.value
    value = None if prediction is None else float(prediction)
    return PredictionRow(quantity, unit, value, model, repeats)


class Prediction:
    """The result of ``workbook.predict``: a number in ``unit``, or none yet.

    Attributes:
        value: the number; None if there is none.
        locked_at: when it was first measured, as ISO 8601; None if it has not been.
        form: shows it in a notebook (``form.PredictionForm``); None elsewhere.
    """

    def __init__(self, quantity: str, unit: str, key: str):
        self.quantity = quantity
        self.unit = unit
        self.value: float | None = None
        self.locked_at: str | None = None
        self.form: Any = None
        self._page = current_page()
        self._key = key
        self._entered_at = ""
        # Continue with the newest one that is recorded, unless the page asked for another unit.
        recorded = record.read().predictions.get(self._page, {}).get(key)
        if recorded and recorded[-1].unit == unit:
            self.value = recorded[-1].value
            self.locked_at = recorded[-1].measured_at
            self._entered_at = recorded[-1].predicted_at

    def enter(self, value: float | str | None) -> None:
        """Make or change the prediction; an empty text or None takes it back.

        Raises:
            ValueError: it is locked, or ``value`` is not a number in a fitting unit.
        """
        if self.locked_at is not None:
            raise ValueError(str(self))
        if isinstance(value, str):
            value = parse_typed(value, self.unit) if value.strip() else None
        if value is not None and not math.isfinite(value):
            raise ValueError(f"a prediction must be a finite number, got {value}")
        self.value = value
        self._entered_at = record.now()
        self._record()

    def measured(self, measured: float, model: float | None = None) -> None:
        """Lock the prediction, and record it beside the measurement and the formula."""
        self.locked_at = self.locked_at or record.now()
        model = None if model is None else float(model)
        self._record(measured=float(measured), model=model, measured_at=self.locked_at)

    def again(self) -> None:
        """Begin a new prediction; the one before stays recorded."""
        self.value = self.locked_at = None
        if self.form is not None:
            self.form.field.value = ""
            self.form.refresh()

    def _record(self, **measured: Any) -> None:
        predicted = None
        if self.value is not None:
            value = float(self.value)
            predicted = Predicted(self.quantity, self.unit, value, self._entered_at, **measured)
        record.note_prediction(self._page, self._key, predicted)
        if self.form is not None:
            self.form.refresh()

    @property
    def text(self) -> str:
        """The number with its unit in a readable scale; empty if there is none."""
        return "" if self.value is None else format_value(self.value, self.unit)

    def __repr__(self) -> str:
        begin = f"Your prediction of {self.quantity}:"
        if self.locked_at is None and self.unit:
            return f"{begin} {self.text or f'none yet ({self.unit})'}"
        if self.locked_at is None:
            return f"{begin} {self.text or 'none yet'}"
        since = datetime.fromisoformat(self.locked_at).astimezone()
        locked = f"locked since it was measured, {since:%Y-%m-%d %H:%M}"
        return f"{begin} {self.text or 'none'}, {locked}; .again() begins a new one"
