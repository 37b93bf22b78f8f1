"""Results as figures: pure functions from data to a figure with alt text and a caption.

Each returns a ``CaptionedFigure``, which Jupyter shows and ``save`` writes.
"""

from workbook.plots.bars import bars as bars
from workbook.plots.figure import CaptionedFigure as CaptionedFigure
from workbook.plots.learning_curves import learning_curves as learning_curves
from workbook.plots.memory_ledger import memory_ledger as memory_ledger
from workbook.plots.models import (
    bucket_overlap as bucket_overlap,
    staleness_histogram as staleness_histogram,
    staleness_model as staleness_model,
)
from workbook.plots.palette import STYLES as STYLES
from workbook.plots.pipeline import (
    pipeline_timeline as pipeline_timeline,
    pipeline_timetable as pipeline_timetable,
    step_by_micro_batches as step_by_micro_batches,
)
from workbook.plots.replicas import replicas as replicas
from workbook.plots.ring import (
    ring_states as ring_states,
    ring_step as ring_step,
    ring_steps as ring_steps,
)
from workbook.plots.size_curves import (
    communication_time as communication_time,
    crossings as crossings,
    size_curves as size_curves,
    time_by_ranks as time_by_ranks,
)
from workbook.plots.timeline import timeline as timeline
