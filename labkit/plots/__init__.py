"""Results as figures: pure functions from data to a figure with alt text and a caption.

    timeline          what each rank did when
    phases            seconds by kind, stacked
    ring_steps        an all-reduce worked out on paper, state by state (ring_grid: one state)
    ring_step         one step of it, in numbers and words (ring_words: the words)
    learning_curves   loss and held-out accuracy, by epoch and by second
    bars              one quantity, measured beside model
    bucket_overlap    a backward pass with DDP's buckets, on paper
    size_curves       time over the tensor's size (crossings: where two cross)
    staleness_histogram, staleness_model   how late gradients came, or would come

Each returns a ``CaptionedFigure``, which Jupyter shows and ``save`` writes.
"""

from labkit.plots.buckets import BUCKET_SIZES_MB, LINKS, bucket_overlap
from labkit.plots.comparisons import bars, learning_curves
from labkit.plots.curves import crossings, size_curves
from labkit.plots.figure import STYLES, CaptionedFigure, Style
from labkit.plots.ring import (
    RingState,
    ring_grid,
    ring_states,
    ring_step,
    ring_steps,
    ring_words,
)
from labkit.plots.spans import phases, timeline
from labkit.plots.staleness import staleness_histogram, staleness_model

__all__ = [
    "BUCKET_SIZES_MB",
    "LINKS",
    "STYLES",
    "CaptionedFigure",
    "RingState",
    "Style",
    "bars",
    "bucket_overlap",
    "crossings",
    "learning_curves",
    "phases",
    "ring_grid",
    "ring_states",
    "ring_step",
    "ring_steps",
    "ring_words",
    "size_curves",
    "staleness_histogram",
    "staleness_model",
    "timeline",
]
