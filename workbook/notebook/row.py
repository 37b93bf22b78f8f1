"""Prediction, model and measurement of one quantity side by side, in one row of a table."""

import html
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.units import as_repeats, format_number, format_value, html_table


@dataclass(frozen=True)
class PredictionRow:
    """One quantity: what was predicted, what a formula gives, what was measured.

    Attributes:
        quantity, unit, prediction, model: as in ``predict_row``; None for a number not given.
        repeats: the measurements; their median is shown and compared.
        note: a sentence below the row; empty if there is nothing to say.
    """

    quantity: str
    unit: str
    prediction: float | None
    model: float | None
    repeats: tuple[float, ...]
    note: str = ""

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
        text = f"{text} ({', '.join(ratios)})" if ratios else text
        return f"{text}\n{self.note}" if self.note else text

    def _repr_html_(self) -> str:
        table = html_table(self.cells(), [self.cells().values()])
        return table + (f"<p>{html.escape(self.note)}</p>" if self.note else "")

    def _text(self, value: float | None, missing: str) -> str:
        return missing if value is None else format_value(value, self.unit)

    def _measured_text(self) -> str:
        text = format_value(self.measured, self.unit)
        low, high = min(self.repeats), max(self.repeats)
        if low == high:
            return text
        between = f"{format_value(low, self.unit)} to {format_value(high, self.unit)}"
        return f"{text} (median of {len(self.repeats)}, {between})"


def make_row(
    quantity: str,
    unit: str,
    prediction: float | None,
    model: float | None,
    measured: float | Iterable[float],
) -> PredictionRow:
    """The row; the arguments are those of ``predict_row``.

    Raises:
        ValueError: a value that is not a number, or no measurement.
    """
    return PredictionRow(
        quantity,
        unit,
        number_or_none(prediction, "prediction", unit),
        number_or_none(model, "model", unit),
        tuple(as_repeats(measured)),
    )


def number_or_none(value: float | None, name: str, unit: str) -> float | None:
    """``value`` as a float; None for None and ``...``.

    Raises:
        ValueError: anything else that is not a number.
    """
    if value is None or value is ...:
        return None
    try:
        if isinstance(value, str):
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name} must be a number in {unit}, got {value!r}: give it without its unit, "
            "or None to continue without one"
        ) from None


def _ratio_text(ratio: float | None) -> str:
    return "–" if ratio is None else f"{format_number(ratio)} ×"
