"""Prediction, model and measurement of one quantity side by side, in one row of a table."""

import statistics
from dataclasses import dataclass

from labkit.units import format_number, format_value, html_table


@dataclass(frozen=True)
class PredictionRow:
    """One quantity; ``prediction`` and ``model`` are None where there is no such number.

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
        low, measured, high = (
            format_value(number, self.unit)
            for number in (min(self.repeats), self.measured, max(self.repeats))
        )
        if len(set(self.repeats)) > 1:
            measured += f" (median of {len(self.repeats)}, from {low} to {high})"
        cells = {"quantity": self.quantity}
        for name, number in (("prediction", self.prediction), ("model", self.model)):
            cells[name] = f"no {name}" if number is None else format_value(number, self.unit)
        cells["measured"] = measured
        for name, number in (("prediction", self.prediction), ("model", self.model)):
            cells[f"× {name}"] = format_number(self.measured / number) if number else "–"
        return cells

    def __repr__(self) -> str:
        cells = self.cells()
        names = ("prediction", "model")
        shown = [
            cells[name] if cells[name].startswith("no") else f"{name} {cells[name]}"
            for name in names
        ]
        text = f"{self.quantity}: {', '.join(shown)}, measured {cells['measured']}"
        ratios = [(cells[f"× {name}"], name) for name in names]
        compared = ", ".join(f"{ratio} × the {name}" for ratio, name in ratios if ratio != "–")
        return f"{text} ({compared})" if compared else text

    def _repr_html_(self) -> str:
        return html_table(self.cells(), [self.cells().values()])
