"""Results as figures: pure functions from data to a figure with alt text and a caption.

Each returns a ``CaptionedFigure``, which Jupyter shows and ``save`` writes.
"""

from workbook.plots.bars import bars
from workbook.plots.figure import CaptionedFigure
from workbook.plots.learning_curves import learning_curves
from workbook.plots.memory_ledger import memory_ledger
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
    "memory_ledger",
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
