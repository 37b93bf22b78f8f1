"""Interactive figures, for notebooks with a kernel.

    bucket_explorer      the model of DDP's buckets: ``plots.bucket_overlap`` with controls
    split_explorer       a model cut into stages: a picture whose cuts are dragged; runs it
    ring_stepper         ring all-reduce step by step: ``plots.ring_step`` with two sliders
    staleness_explorer   the model of late gradients: ``plots.staleness_model`` with three sliders

The picture is drawn in the browser; ``plots.split_costs`` is its static twin. The others are drawn
by a pure function of ``workbook.plots``, which also draws the static figure for pages without a
kernel. Each prints as a line of text where there is no browser, can be used from the keyboard, and
keeps its state when its cell is run again (``kept``). ``explorer`` has what they share, ``job``
and ``idle`` what runs in the background.
"""

from labkit.units import unknown_name
from workbook.widgets.bucket_explorer import bucket_explorer
from workbook.widgets.ring_stepper import ring_stepper
from workbook.widgets.split_explorer import split_explorer
from workbook.widgets.staleness_explorer import staleness_explorer

__all__ = ["bucket_explorer", "ring_stepper", "split_explorer", "staleness_explorer"]

__getattr__ = unknown_name(__name__)
