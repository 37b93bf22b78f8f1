"""Sliders of split points that stay in order: a slider that is moved pushes the others."""

from collections.abc import Sequence

import ipywidgets

# Room for the longest name of a control.
WIDE = {"description_width": "8em"}


class CutSliders:
    """A slider for each cut of a model, and beside it the name of the layer after the cut.

    Attributes:
        sliders: one per possible cut, from the first to the last; unused ones are hidden.
        rows: each slider with its layer.
    """

    def __init__(self, layers: Sequence[str], most: int):
        """``layers``: the names of the L layers; ``most``: the largest number of cuts, below L."""
        self._layers = list(layers)
        self._shown = most
        look = {"style": WIDE, "layout": {"width": "36em"}}
        self.sliders = [
            ipywidgets.IntSlider(cut, cut, len(layers) - 1, description=f"cut {cut}", **look)
            for cut in range(1, most + 1)
        ]
        self._labels = [ipywidgets.Label() for _ in self.sliders]
        self.rows = [ipywidgets.HBox(pair) for pair in zip(self.sliders, self._labels)]

    @property
    def points(self) -> tuple[int, ...]:
        """The split points, in order."""
        return tuple(slider.value for slider in self.sliders[: self._shown])

    def move(self, points: Sequence[int]) -> None:
        """Show cuts at these points. The sliders' ranges leave each stage at least one layer."""
        self._shown = len(points)
        for cut, (slider, row) in enumerate(zip(self.sliders, self.rows)):
            behind = max(0, self._shown - 1 - cut)
            slider.max = len(self._layers) - 1 - behind
            row.layout.display = None if cut < self._shown else "none"
        for slider, point in zip(self.sliders, points):
            slider.value = point
        self._name()

    def resize(self, count: int) -> None:
        """Show ``count`` cuts: the present cuts, moved if necessary, then new ones."""
        points = list(self.points[:count])
        # Each cut leaves at least one layer for every stage after it.
        for cut in reversed(range(len(points))):
            points[cut] = min(points[cut], len(self._layers) - count + cut)
        while len(points) < count:
            points.append((points[-1] + len(self._layers)) // 2)
        self.move(points)

    def push(self, slider: ipywidgets.IntSlider) -> None:
        """Move the other sliders as far as needed to keep them in order after ``slider`` moved."""
        moved = self.sliders.index(slider)
        for cut in range(moved + 1, self._shown):
            least = self.sliders[cut - 1].value + 1
            self.sliders[cut].value = max(self.sliders[cut].value, least)
        for cut in reversed(range(moved)):
            most = self.sliders[cut + 1].value - 1
            self.sliders[cut].value = min(self.sliders[cut].value, most)
        self._name()

    def _name(self) -> None:
        for slider, label in zip(self.sliders, self._labels):
            label.value = f"layer {slider.value}: {self._layers[slider.value]}"
