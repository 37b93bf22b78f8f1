"""Predict, run, explain: prediction, model and measurement of one quantity side by side.

A wrong prediction is never an error and is not marked: the ratio says how far it was off, and the
text that follows it in the notebook says why.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.units import as_repeats, format_number, format_value, html_table, spelled


@dataclass(frozen=True)
class PredictionRow:
    """One quantity: what was predicted, what a formula gives, what was measured.

    Attributes:
        quantity, unit, prediction, model: as in ``predict_row``; None for a number not given.
        repeats: the measurements; their median is shown and compared.
    """

    quantity: str
    unit: str
    prediction: float | None
    model: float | None
    repeats: tuple[float, ...]

    @property
    def measured(self) -> float:
        return statistics.median(self.repeats)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None without a prediction, or with a prediction of 0."""
        return self.measured / self.prediction if self.prediction else None

    @property
    def model_ratio(self) -> float | None:
        """Measured over the model; None without a model, or with a model of 0."""
        return self.measured / self.model if self.model else None

    def cells(self) -> dict[str, str]:
        """The texts of the row by the table's columns."""
        return {
            "quantity": self.quantity,
            "your prediction": self._text(self.prediction, "no prediction"),
            "model": self._text(self.model, "no model"),
            "measured": self._measured_text(),
            "measured / prediction": _ratio_text(self.ratio),
            "measured / model": _ratio_text(self.model_ratio),
        }

    def __repr__(self) -> str:
        quantity, prediction, model, measured, ratio, model_ratio = self.cells().values()
        ratios = [f"{ratio} the prediction"] if self.ratio is not None else []
        ratios += [f"{model_ratio} the model"] if self.model_ratio is not None else []
        prediction = prediction if self.prediction is None else f"prediction {prediction}"
        model = model if self.model is None else f"model {model}"
        text = f"{quantity}: {prediction}, {model}, measured {measured}"
        return f"{text} ({', '.join(ratios)})" if ratios else text

    def _repr_html_(self) -> str:
        return html_table(self.cells(), [self.cells().values()])

    def _text(self, value: float | None, missing: str) -> str:
        return missing if value is None else format_value(value, self.unit)

    def _measured_text(self) -> str:
        text = format_value(self.measured, self.unit)
        low, high = min(self.repeats), max(self.repeats)
        if low == high:
            return text
        between = f"{format_value(low, self.unit)} to {format_value(high, self.unit)}"
        return f"{text} (median of {len(self.repeats)}, {between})"


@spelled
def predict_row(
    quantity: str,
    unit: str,
    prediction: float | None,
    model: float | None,
    measured: float | Iterable[float],
) -> PredictionRow:
    """Put prediction, model and measurement of one quantity into one table row.

    Args:
        quantity: what it is, for example ``time of one all-reduce``.
        unit: of all three numbers: ``bytes`` and ``s`` are scaled when shown (MiB, ms), any other
            word is not.
        prediction: the learner's number; None or ``...`` if none was made.
        model: what the formula gives; None without a formula.
        measured: a number, or the list of repeats.

    Raises:
        ValueError: a value that is not a number, or no measurement.
    """
    return PredictionRow(
        quantity,
        unit,
        _number(prediction, "prediction", unit),
        _number(model, "model", unit),
        tuple(as_repeats(measured)),
    )


def _number(value: float | None, name: str, unit: str) -> float | None:
    if value is None or value is ...:
        return None
    try:
        if isinstance(value, str):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be a number in {unit}, got {value!r}: give it without its unit, "
            "or None to continue without one"
        ) from None


def _ratio_text(ratio: float | None) -> str:
    return "–" if ratio is None else f"{format_number(ratio)} ×"
