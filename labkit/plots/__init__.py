"""Results as figures: pure functions from data to a figure with alt text and a caption.

    timeline          what each rank did when
    phases            seconds by kind, stacked
    ring_steps        an all-reduce worked out on paper, state by state (ring_grid: one state)
    learning_curves   loss and held-out accuracy, by epoch and by second
    bars              one quantity, measured beside model

Each returns a ``CaptionedFigure``, which Jupyter shows and ``save`` writes.
"""

from labkit.plots.comparisons import bars, learning_curves
from labkit.plots.figure import STYLES, CaptionedFigure, Style
from labkit.plots.ring import RingState, ring_grid, ring_states, ring_steps
from labkit.plots.spans import phases, timeline

__all__ = [
    "STYLES",
    "CaptionedFigure",
    "RingState",
    "Style",
    "bars",
    "learning_curves",
    "phases",
    "ring_grid",
    "ring_states",
    "ring_steps",
    "timeline",
]
