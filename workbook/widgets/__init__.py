"""Interactive figures, for notebooks with a kernel.

    bucket_explorer      a predicted backward: ``plots.bucket_overlap`` with controls
    split_explorer       a model cut into stages: a picture whose cuts are dragged; runs it
    pipeline_explorer    micro-batches and a schedule: the step predicted, then run
    memory_explorer      what a rank holds under sharding: the formula, then a run
    ring_stepper         ring all-reduce step by step: ``plots.ring_step`` with two sliders
    staleness_explorer   predicted lateness: ``plots.staleness_model`` with three sliders

The picture is drawn in the browser from numbers that Python sends. The others show a figure of
``workbook.plots``. Each prints as a line of text where there is no browser, and can be used from
the keyboard.
"""

from workbook.widgets.explorers import (
    bucket_explorer,
    pipeline_explorer,
    ring_stepper,
    staleness_explorer,
)
from workbook.widgets.memory_explorer import memory_explorer
from workbook.widgets.split_explorer import SplitExplorer as split_explorer

__all__ = [
    "bucket_explorer",
    "memory_explorer",
    "pipeline_explorer",
    "ring_stepper",
    "split_explorer",
    "staleness_explorer",
]
