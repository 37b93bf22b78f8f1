"""What the tests of figures draw, and how they read a figure."""

from types import SimpleNamespace

import numpy as np

from labkit.engine.tracing import Span, Trace

SPANS = [
    Span(0, "compute", 0.000, 0.004),
    Span(0, "communicate", 0.004, 0.005, num_bytes=8, peer=1),
    Span(1, "compute", 0.000, 0.001),
    Span(1, "wait", 0.001, 0.004, peer=0),
    Span(1, "communicate", 0.004, 0.005, num_bytes=8, peer=0),
]
TRACE = Trace.merge([SPANS])
EPOCHS = [
    {"loss": 2.0, "test_accuracy": 0.25, "seconds": 3.0},
    {"loss": 1.0, "test_accuracy": 0.75, "seconds": 2.0},
]
RUN = SimpleNamespace(epochs=EPOCHS, bytes_sent=[1_000_000, 6_000_000])
# (worker, staleness) of each update.
UPDATES = [[1, 0], [2, 1], [1, 1], [3, 3], [1, 0]]


def legend_of(figure):
    return [text.get_text() for legend in figure.figure.legends for text in legend.get_texts()]


def spans_of(figure):
    """The bars of a timeline."""
    (collection,) = [c for c in figure.figure.axes[0].collections if c.get_gid() == "spans"]
    return collection


def boxes_of(figure):
    """[left, right, top, bottom] of each span's bar."""
    boxes = [path.get_extents() for path in spans_of(figure).get_paths()]
    return np.array([(box.x0, box.x1, box.y0, box.y1) for box in boxes])


def lanes_of(figure):
    return [label.get_text() for label in figure.figure.axes[0].get_yticklabels()]


def bars_of(axes):
    """By series, its bars."""
    found = {}
    for container in axes.containers:
        if hasattr(container, "patches"):
            found.setdefault(container.get_label(), []).extend(container.patches)
    return found
