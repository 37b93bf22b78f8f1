"""Prediction, formula and measurement of one quantity side by side, in one row of a table."""

import statistics
from dataclasses import dataclass

from labkit.units import format_number, format_value, html_table


@dataclass(frozen=True)
class PredictionRow:
    """One quantity; ``prediction`` and ``model``, of a formula, are None where there is none.

    The median of the ``repeats`` is shown and compared.
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
        measured = format_value(self.measured, self.unit)
        if len(set(self.repeats)) > 1:
            low = format_value(min(self.repeats), self.unit)
            high = format_value(max(self.repeats), self.unit)
            measured += f" (median of {len(self.repeats)}, from {low} to {high})"
        return {
            "quantity": self.quantity,
            "prediction": self._text("prediction", self.prediction),
            "formula": self._text("formula", self.model),
            "measured": measured,
            "× prediction": self._ratio(self.prediction),
            "× formula": self._ratio(self.model),
        }

    def _text(self, name: str, number: float | None) -> str:
        if number is None:
            return f"no {name}"
        return format_value(number, self.unit)

    def _ratio(self, number: float | None) -> str:
        if not number:
            return "–"
        return format_number(self.measured / number)

    def __repr__(self) -> str:
        cells = self.cells()
        parts = []
        ratios = []
        for name, number in (("prediction", self.prediction), ("formula", self.model)):
            if number is None:
                parts.append(cells[name])
            else:
                parts.append(f"{name} {cells[name]}")
            if number:
                ratios.append(f"{cells[f'× {name}']} × the {name}")
        text = f"{self.quantity}: {', '.join(parts)}, measured {cells['measured']}"
        if ratios:
            text += f" ({', '.join(ratios)})"
        return text

    def _repr_html_(self) -> str:
        return html_table(self.cells(), [self.cells().values()])
