"""The ring under two sliders: which step, and of how many ranks."""

from collections.abc import Sequence
from typing import Any

import ipywidgets

from labkit import plots
from labkit.widgets.explorer import Explorer

MAX_RANKS = 6

Values = Sequence[Sequence[float]]


def ring_stepper(world_size: int = 4, values: Values | None = None) -> "RingStepper":
    """Step through a ring all-reduce: who holds what after each step, and what has just moved.

    The sliders move by arrow keys, too. ``plots.ring_step`` draws the same figure without them.

    Args:
        world_size: the number of ranks to start with, 2 to 6; the slider changes it.
        values: [P][P], the number that each rank has for each chunk at the start. Smaller rings
            take the first rows and columns; larger ones than P cannot be chosen. By default rank
            r has (c + 1) x 10^r for chunk c.

    Raises:
        ValueError: a world size out of that range, or values that are not square.
    """
    most = MAX_RANKS
    if values is not None:
        plots.ring_states(len(values), values)  # checks their shape
        most = min(most, len(values))
    if world_size not in range(2, most + 1):
        limit = "" if values is None else f", and the values are for {len(values)} ranks"
        raise ValueError(
            f"the stepper shows 2 to {MAX_RANKS} ranks{limit}, got world_size {world_size}"
        )
    return RingStepper(world_size, values, most)


class RingStepper(Explorer):
    """Two sliders above a figure.

    Attributes:
        step: the slider of the step, 0 to 2 (P - 1).
        ranks: the slider of the world size P. A change keeps the step where P has it.
    """

    def __init__(self, world_size: int, values: Values | None, most: int):
        last = 2 * (world_size - 1)
        self.step = ipywidgets.IntSlider(0, 0, last, description="step")
        self.ranks = ipywidgets.IntSlider(world_size, 2, most, description="ranks")
        self._values = values
        # Before the figure follows the ranks, the steps do.
        self.ranks.observe(self._resize, "value")
        super().__init__(self._draw_step, self.step, self.ranks)

    def _draw_step(self, step: int, world_size: int) -> plots.CaptionedFigure:
        values = self._values
        if values is not None:
            values = [row[:world_size] for row in values[:world_size]]
        return plots.ring_step(step, world_size, values)

    def _resize(self, _change: Any) -> None:
        # A step beyond the new maximum is lowered and shown, already with the new ranks.
        self.step.max = 2 * (self.ranks.value - 1)
