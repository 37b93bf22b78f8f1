"""Stacked bars on a sheet: those of a model, and beside each the one that was measured."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labkit.plots.figure import Style
from labkit.plots.sheet import Box, Panel


class Bar(NamedTuple):
    """A stacked bar: its parts by meaning, and the repeats of their sum."""

    parts: dict[str, float]
    repeats: Sequence[float] = ()

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.repeats) < 2:
            return self.total, self.total
        low, _, high = statistics.quantiles(self.repeats, n=4, method="inclusive")
        return low, high

    @property
    def top(self) -> float:
        return max(self.total, self.quartiles[1])


# Of the model, and measured if there is such: a bar for each group.
Columns = list[list[Bar]]


def draw_bars(
    panel: Panel, columns: Columns, looks: Mapping[str, Style], scale: float, digits: int
) -> list[float]:
    """Draw a group of bars for each place: the model's, the measured one to the right of it.

    Args:
        panel: where.
        columns: the model's bars, and the measured ones if there are any.
        looks: by meaning.
        scale: of the values in one unit of the panel's axis.
        digits: of the numbers above the bars, at least.

    Returns:
        The centers of the groups.
    """
    places = panel.places(len(columns[0]))
    pitch = (panel.frame.right - panel.frame.left) / len(places)
    shifts = (-0.22, 0.22) if len(columns) == 2 else (0.0,)
    half = 0.21 * pitch if len(columns) == 2 else min(0.25 * pitch, 40)
    models = {kind: look.model for kind, look in looks.items()}
    for bars, look_of, shift in zip(columns, (models, looks), shifts):
        for place, bar in zip(places, bars):
            x = place + shift * pitch
            _draw_stack(panel, x, half, bar, look_of, scale)
            _draw_whisker(panel, x, *(panel.y(end / scale) for end in bar.quartiles))
            number = _number(bar.total / scale, digits)
            panel.sheet.write(number, x, panel.y(bar.top / scale) + 3)
    return places


def _draw_stack(
    panel: Panel, x: float, half: float, bar: Bar, looks: Mapping[str, Style], scale: float
) -> None:
    value = 0.0
    for kind, size in bar.parts.items():
        low, high = panel.y(value / scale), panel.y((value + size) / scale)
        if size:
            panel.sheet.box(kind, looks[kind], Box(x - half, low, x + half, high))
        value += size


def _draw_whisker(panel: Panel, x: float, low: float, high: float) -> None:
    if high > low:
        panel.sheet.line((x, low), (x, high))
        panel.sheet.line((x - 3, low), (x + 3, low))
        panel.sheet.line((x - 3, high), (x + 3, high))


def _number(value: float, digits: int) -> str:
    """As short as bars are narrow: with 3 digits 123, 12.3, 1.23, 0.12, and <.01 for less."""
    places = max(0, digits - len(f"{value:.0f}"))
    if 0 < value < 0.5 * 10**-places:
        return f"<{10**-places:.{places}f}".replace("0.", ".")
    return "0" if value == 0 else f"{value:.{places}f}"
