"""Ring all-reduce with two sliders: the step, and the number of ranks."""

from collections.abc import Sequence

import ipywidgets

from workbook import plots
from workbook.widgets.explorer import Explorer

MAX_RANKS = 6


def ring_stepper(world_size: int = 4, values: Sequence[Sequence[float]] | None = None) -> Explorer:
    """Step through a ring all-reduce: what each rank holds after a step, and what has just moved.

    The controls are ``step`` and ``ranks``. ``plots.ring_step`` draws the same figure.

    Args:
        world_size: the number of ranks to start with, 2 to 6. A change keeps the step if the new
            ring has that step.
        values: [P][P], the number that each rank has for each chunk at the start. Smaller rings
            take the first rows and columns; larger ones than P cannot be chosen. By default rank
            r has (c + 1) x 10^r for chunk c.

    Raises:
        ValueError: a world size out of range, or values that are not square.
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

    def draw(step: int, size: int) -> plots.CaptionedFigure:
        mine = None if values is None else [row[:size] for row in values[:size]]
        return plots.ring_step(step, size, mine)

    steps = ipywidgets.IntSlider(0, 0, description="step")
    ranks = ipywidgets.IntSlider(world_size, 2, most, description="ranks")
    # Linked before the Explorer, so that the steps follow the ranks first: a step beyond the new
    # maximum is lowered before the figure is drawn with the new ranks.
    ipywidgets.dlink((ranks, "value"), (steps, "max"), lambda size: 2 * (size - 1))
    return Explorer(draw, step=steps, ranks=ranks)
