"""Figures that answer to sliders, for notebooks with a kernel.

    ring_stepper      ring all-reduce step by step: ``plots.ring_step`` with two sliders

Each draws by a pure function of ``labkit.plots``, which is also its twin for pages that stand
still, and prints as a line of text where there is no browser.
"""

from labkit.widgets.ring import RingStepper, ring_stepper

__all__ = ["RingStepper", "ring_stepper"]
