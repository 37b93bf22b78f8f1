"""Predict, run, explain: make a prediction, measure, and compare the two.

A prediction is locked by its first measurement. A wrong one is never an error and is not marked:
the ratio says how far it was off, and the text that follows it in the notebook says why.
"""

import os
from collections.abc import Iterable
from dataclasses import replace

from labkit.runtime.output import kernel
from labkit.units import as_repeats, format_value, spelled
from workbook.notebook import record
from workbook.notebook.pages import current_page
from workbook.notebook.prediction import Prediction
from workbook.notebook.record_format import entry
from workbook.notebook.row import PredictionRow, make_row
from workbook.notebook.typed import scale_between


def predict(
    quantity: str, unit: str, *, value: float | str | None = None, id: str | None = None
) -> Prediction:
    """Ask for a prediction of one quantity, in a notebook by a field, elsewhere by ``value``.

    Give the result to ``predict_row`` in the cell that measures: from then on it is locked. A
    prediction that has been measured is shown again, also after a restart of the kernel.

    Args:
        quantity: what it is, for example ``time of one all-reduce``; or a question.
        unit: of the number, for example ``s``; the reader may type another unit of the same kind.
        value: the prediction, as a number in ``unit`` or as it would be typed (``"1.5 ms"``).
        id: a name that is unique on the page, where two predictions have the same quantity.

    Raises:
        ValueError: ``value`` is not a number in such a unit.
    """
    prediction = Prediction(quantity, unit, str(id or quantity))
    if value is not None and value is not ... and prediction.locked_at is None:
        prediction.enter(value)
    # A page that is compared with its text shows text.
    if os.environ.get("LABKIT_LIVE") != "0" and kernel() is not None:
        from workbook.notebook.form import PredictionForm

        prediction.form = PredictionForm(prediction)
    prediction.show()
    return prediction


@spelled
def predict_row(
    quantity: str,
    unit: str,
    prediction: "float | Prediction | None",
    model: float | None,
    measured: float | Iterable[float],
) -> PredictionRow:
    """Put prediction, model and measurement of one quantity into one table row.

    Args:
        quantity: what it is, for example ``time of one all-reduce``.
        unit: of all three numbers: ``bytes`` and ``s`` are scaled when shown (MiB, ms), any other
            word is not.
        prediction: what ``predict`` has returned, which this locks; or the learner's number; None
            or ``...`` if none was made.
        model: what the formula gives; None without a formula.
        measured: a number, or the list of repeats.

    Raises:
        ValueError: a value that is not a number, no measurement, or a prediction in a unit of
            another kind.
    """
    if isinstance(prediction, Prediction):
        return _row_of(prediction, quantity, unit, model, measured)
    row = make_row(quantity, unit, prediction, model, measured)
    made = entry(quantity, unit, row.prediction, record.now())
    if made is None:
        return row
    kept = record.note_row(current_page(), str(quantity), made, row.measured, row.model)
    if kept.value * scale_between(kept.unit, unit) == made.value:
        return row
    text = f"Recorded is what you predicted at first: {format_value(kept.value, kept.unit)}."
    return replace(row, note=text)


def _row_of(
    prediction: Prediction,
    quantity: str,
    unit: str,
    model: float | None,
    measured: float | Iterable[float],
) -> PredictionRow:
    """The row of a prediction that was made in its own unit, which may be another one."""
    if unit == prediction.unit:
        return replace(prediction.measured(measured, model), quantity=quantity)
    scale = scale_between(prediction.unit, unit)
    predicted = None if prediction.value is None else prediction.value * scale
    row = make_row(quantity, unit, predicted, model, measured)
    model = None if row.model is None else row.model / scale
    prediction.measured([repeat / scale for repeat in as_repeats(row.repeats)], model)
    return row
