"""The asynchronous parameter server with sliders: workers, straggler, bound."""

import math
from typing import Any

import ipywidgets

from labkit.schedules.staleness import check_bound
from workbook import plots
from workbook.plots.staleness import MAX_WORKERS
from workbook.widgets.explorer import Explorer

MAX_FACTOR = 8
# The bound's slider has this many values from W - 1, the smallest possible, and then "none".
_MORE = 12


def staleness_explorer(
    workers: int = 3, factor: float = 4, bound: int | None = None
) -> "StalenessExplorer":
    """Explore the model of an asynchronous run; ``plots.staleness_model`` draws it.

    The controls are ``workers``, ``factor`` and ``bound``.

    Args:
        workers: W to start with, 2 to 6. A change moves the range of ``bound``, and a bound
            outside the new range with it.
        factor: how many times as long the straggler computes, to start with: an integer, 1 to 8.
        bound: on the staleness to start with, W - 1 to W + 10, or None.

    Raises:
        ValueError: a value to start with that its slider does not offer.
    """
    if workers not in range(2, MAX_WORKERS + 1):
        raise ValueError(f"the explorer shows 2 to {MAX_WORKERS} workers, got {workers!r}")
    if factor not in range(1, MAX_FACTOR + 1):
        raise ValueError(f"the factor is an integer from 1 to {MAX_FACTOR}, got {factor!r}")
    check_bound(workers, bound)
    if bound is not None and bound not in _bounds(workers).values():
        raise ValueError(f"bound {bound} is beyond the slider's {workers + _MORE - 2}: use None")
    return StalenessExplorer(workers, factor, bound)


class StalenessExplorer(Explorer):
    """Sliders ``workers``, ``factor`` and ``bound`` above a predicted asynchronous run."""

    def __init__(self, workers: int, factor: float, bound: int | None):
        self.workers = ipywidgets.IntSlider(workers, 2, MAX_WORKERS, description="workers")
        # Observed before the Explorer's own handler: the bounds move before the drawing.
        self.workers.observe(self._move_bounds, "value")
        self.factor = ipywidgets.IntSlider(factor, 1, MAX_FACTOR, description="straggler")
        self.bound = ipywidgets.SelectionSlider(
            options=_bounds(workers),
            value=math.inf if bound is None else bound,
            description="bound",
        )
        super().__init__(plots.staleness_model, self.workers, self.factor, self.bound)

    def _arguments(self, values: list[Any]) -> tuple[int, int, int | None]:
        workers, factor, bound = values
        return workers, factor, None if bound == math.inf else bound

    def _move_bounds(self, _change: Any) -> None:
        bounds, chosen = _bounds(self.workers.value), self.bound.value
        least, *_, largest, _ = bounds.values()
        if chosen != math.inf:
            chosen = min(max(chosen, least), largest)
        # Setting new options selects the first one for a moment, which must not be shown.
        with self.moving():
            self.bound.options, self.bound.value = bounds, chosen


def _bounds(workers: int) -> dict[str, float]:
    """The options of the bound's slider for W workers; infinity stands for no bound."""
    numbers = range(workers - 1, workers + _MORE - 1)
    return {str(bound): bound for bound in numbers} | {"none": math.inf}
