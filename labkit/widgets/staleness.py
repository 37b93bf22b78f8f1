"""The asynchronous parameter server under sliders: workers, straggler, bound."""

import math
from typing import Any

import ipywidgets

from labkit import plots
from labkit.plots.staleness import MAX_WORKERS, staleness_words
from labkit.staleness import check_bound

MAX_FACTOR = 8
# The bound's slider counts from W - 1, the least there can be; its last place is no bound.
_MORE = 12


def staleness_explorer(
    workers: int = 3, factor: float = 4, bound: int | None = None
) -> "StalenessExplorer":
    """Explore the model of an asynchronous run; ``plots.staleness_model`` draws it still.

    The sliders move by arrow keys, too.

    Args:
        workers: W to start with, 2 to 6.
        factor: the straggler's to start with, 1 to 8 in whole numbers.
        bound: of staleness to start with, W - 1 to W + 10, or None.

    Raises:
        ValueError: a start that the sliders do not have.
    """
    if workers not in range(2, MAX_WORKERS + 1):
        raise ValueError(f"the explorer shows 2 to {MAX_WORKERS} workers, got {workers!r}")
    if factor not in range(1, MAX_FACTOR + 1):
        raise ValueError(f"the factor is a whole number from 1 to {MAX_FACTOR}, got {factor!r}")
    check_bound(workers, bound)
    if bound is not None and bound not in _bounds(workers).values():
        raise ValueError(f"bound {bound} is beyond the slider's {workers + _MORE - 2}: use None")
    return StalenessExplorer(workers, factor, bound)


def _bounds(workers: int) -> dict[str, float]:
    """What the bound's slider has for W workers; its values cannot be None."""
    numbers = range(workers - 1, workers + _MORE - 1)
    return {str(bound): bound for bound in numbers} | {"none": math.inf}


class StalenessExplorer(ipywidgets.VBox):
    """Three sliders above a figure.

    Attributes:
        workers, factor: the sliders of W and of the straggler.
        bound: the slider of the bound. Another W moves its range; where the bound is out of it
            then, it becomes the nearest.
        view: the figure as HTML: picture, alt text, and the model in words.
    """

    def __init__(self, workers: int, factor: float, bound: int | None):
        self.workers = ipywidgets.IntSlider(workers, 2, MAX_WORKERS, description="workers")
        self.factor = ipywidgets.IntSlider(factor, 1, MAX_FACTOR, description="straggler")
        self.bound = ipywidgets.SelectionSlider(
            options=_bounds(workers),
            value=math.inf if bound is None else bound,
            description="bound",
        )
        self.view = ipywidgets.HTML()
        self._controls = self.workers, self.factor, self.bound
        super().__init__([*self._controls, self.view])
        self._pages: dict[tuple, str] = {}
        self._is_moving = False
        self.workers.observe(self._move_bounds, "value")
        for control in (self.factor, self.bound):
            control.observe(self._show, "value")
        self._show()

    def close(self) -> None:
        """Take sliders and figure off the page; nothing listens to them any more."""
        for child in (*self._controls, self.view):
            child.unobserve_all("value")
            child.close()
        super().close()

    def _move_bounds(self, _change: Any) -> None:
        bounds, chosen = _bounds(self.workers.value), self.bound.value
        least, *_, largest, _ = bounds.values()
        if chosen != math.inf:
            chosen = min(max(chosen, least), largest)
        # New options take the first of them for a moment, which is not to be shown.
        self._is_moving = True
        self.bound.options, self.bound.value = bounds, chosen
        self._is_moving = False
        self._show()

    def _chosen(self) -> tuple[int, int, int | None]:
        bound = self.bound.value
        return self.workers.value, self.factor.value, None if bound == math.inf else bound

    def _show(self, _change: Any = None) -> None:
        """Show what the sliders say now, which may be later than the change that called."""
        if self._is_moving:
            return
        key = self._chosen()
        if key not in self._pages:
            page = plots.staleness_model(*key).html()
            # Screen readers say the caption whenever it changes.
            spoken = '<figcaption role="status" aria-live="polite" '
            page = page.replace("<figcaption ", spoken, 1)
            # Widgets have lines as high as buttons.
            self._pages[key] = f'<div style="line-height: 1.4">{page}</div>'
        self.view.value = self._pages[key]

    def __repr__(self) -> str:
        words = staleness_words(*self._chosen())
        return (
            f"[sliders] workers 2 to {MAX_WORKERS}, straggler 1 to {MAX_FACTOR} times as slow, "
            f"bound from workers - 1. {words}"
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # The base class cuts the text, which is all that a stored notebook keeps of a widget.
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": repr(self)}
