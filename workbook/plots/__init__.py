"""Results as figures: pure functions from data to a figure with alt text and a caption.

    timeline          what each rank did when
    phases            seconds by kind, stacked
    ring_steps        an all-reduce worked out on paper, state by state (ring_states: the states)
    ring_step         one step of a ring all-reduce, in numbers and words
    learning_curves   loss and held-out accuracy, by epoch and by second
    bars              one quantity, measured beside model
    bucket_overlap    a backward pass with DDP's buckets, on paper
    size_curves       time over the tensor's size (crossings: the sizes at which two curves cross)
    communication_time   what crosses each cut, by direction and batch size
    staleness_histogram, staleness_model   staleness of the updates, measured or predicted
    split_costs       a model cut into stages: bytes, memory, time of stages and hops
    pipeline_timetable, pipeline_timeline   a pipeline's step on paper, and as it ran
    step_by_micro_batches   a step's time over the number of micro-batches

Each returns a ``CaptionedFigure``, which Jupyter shows and ``save`` writes.
"""

from workbook.plots.bars import bars
from workbook.plots.figure import CaptionedFigure
from workbook.plots.learning_curves import learning_curves
from workbook.plots.models import (
    bucket_overlap,
    staleness_histogram,
    staleness_model,
)
from workbook.plots.palette import STYLES
from workbook.plots.pipeline import (
    pipeline_timeline,
    pipeline_timetable,
    step_by_micro_batches,
)
from workbook.plots.ring import ring_states, ring_step, ring_steps
from workbook.plots.size_curves import communication_time, crossings, size_curves
from workbook.plots.split_costs import split_costs
from workbook.plots.timeline import phases, timeline

__all__ = [
    "STYLES",
    "CaptionedFigure",
    "bars",
    "bucket_overlap",
    "communication_time",
    "crossings",
    "learning_curves",
    "phases",
    "pipeline_timeline",
    "pipeline_timetable",
    "ring_states",
    "ring_step",
    "ring_steps",
    "size_curves",
    "split_costs",
    "staleness_histogram",
    "staleness_model",
    "step_by_micro_batches",
    "timeline",
]
