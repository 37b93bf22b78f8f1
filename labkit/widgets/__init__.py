"""Interactive figures, for notebooks with a kernel.

    bucket_explorer      the model of DDP's buckets: ``plots.bucket_overlap`` with controls
    split_explorer       a model cut into stages: ``plots.split_costs`` with controls; runs it
    ring_stepper         ring all-reduce step by step: ``plots.ring_step`` with two sliders
    staleness_explorer   the model of late gradients: ``plots.staleness_model`` with three sliders

Each is drawn by a pure function of ``labkit.plots``, which also draws the static figure for pages
without a kernel, and prints as a line of text where there is no browser. Controls can be used from
the keyboard, and are attributes of the object returned.
"""

from labkit.units import unknown_name
from labkit.widgets.bucket_explorer import bucket_explorer
from labkit.widgets.ring_stepper import ring_stepper
from labkit.widgets.split_explorer import split_explorer
from labkit.widgets.staleness_explorer import staleness_explorer

__all__ = ["bucket_explorer", "ring_stepper", "split_explorer", "staleness_explorer"]

__getattr__ = unknown_name(__name__)
