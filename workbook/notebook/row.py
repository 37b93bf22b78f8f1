"""Prediction, model and measurement of one quantity side by side, in one row of a table."""

import statistics
from dataclasses import dataclass

from labkit.units import format_number, format_value, html_table


@dataclass(frozen=True)
class PredictionRow:
    """One quantity: what was predicted, what a formula gives, what was measured.

    Attributes:
        quantity, unit: what it is; ``bytes`` and ``s`` are scaled when shown, other units are not.
        prediction, model: None for a number not given.
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

    def cells(self) -> dict[str, str]:
        """The texts of the row by the table's columns."""
        numbers = (
            self.prediction,
            self.model,
            self.measured,
            min(self.repeats),
            max(self.repeats),
        )
        shown = ["" if number is None else format_value(number, self.unit) for number in numbers]
        prediction, model, measured, low, high = shown
        if numbers[-2] != numbers[-1]:
            measured += f" (median of {len(self.repeats)}, from {low} to {high})"
        ratio, model_ratio = (
            f"{format_number(self.measured / number)} ×" if number else "–"
            for number in numbers[:2]
        )
        return {
            "quantity": self.quantity,
            "your prediction": prediction or "no prediction",
            "model": model or "no model",
            "measured": measured,
            "measured / prediction": ratio,
            "measured / model": model_ratio,
        }

    def __repr__(self) -> str:
        quantity, prediction, model, measured, *ratios = self.cells().values()
        prediction = prediction if self.prediction is None else f"prediction {prediction}"
        model = model if self.model is None else f"model {model}"
        named = zip(ratios, ("the prediction", "the model"))
        compared = ", ".join(f"{ratio} {name}" for ratio, name in named if ratio != "–")
        text = f"{quantity}: {prediction}, {model}, measured {measured}"
        return f"{text} ({compared})" if compared else text

    def _repr_html_(self) -> str:
        return html_table(self.cells(), [self.cells().values()])
