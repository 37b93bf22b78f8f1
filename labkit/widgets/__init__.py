"""Figures that answer to sliders, for notebooks with a kernel.

    bucket_explorer   DDP's buckets on paper: ``plots.bucket_overlap`` under controls
    split_explorer    a model cut into stages: ``plots.split_costs`` under controls, and a real run
    ring_stepper      ring all-reduce step by step: ``plots.ring_step`` with two sliders
    staleness_explorer   late gradients on paper: ``plots.staleness_model`` with three sliders

Each draws by a pure function of ``labkit.plots``, which also draws the static figure for pages
without a kernel, and prints as a line of text where there is no browser. Controls answer to the
keyboard, and are attributes of what is returned.
"""

from labkit.widgets.bucket_explorer import bucket_explorer
from labkit.widgets.ring_stepper import ring_stepper
from labkit.widgets.split_explorer import split_explorer
from labkit.widgets.staleness_explorer import staleness_explorer

__all__ = ["bucket_explorer", "ring_stepper", "split_explorer", "staleness_explorer"]
