"""The layer costs of a toy model, and an invented measurement of one of its splits."""

import itertools

from labkit.costs.link import Link
from labkit.costs.planner import LayerCost, Profile
from labkit.engine.tracing import Span, Trace
from labkit.training.measured import MeasuredSplit

MIB = 2**20
# By layer: forward and backward in ms, MiB that leave it.
COSTS = [(10, 20, 8), (1, 1, 8), (5, 15, 4), (1, 1, 1), (4, 6, 1), (1, 2, 0.001)]
LAYERS = [
    LayerCost(f"layer {i}", f / 1e3, b / 1e3, int(out * MIB), MIB * (i % 2 == 0), 2 * MIB)
    for i, (f, b, out) in enumerate(COSTS)
]
PROFILE = Profile("toy", 16, MIB, tuple(LAYERS))
LINK = Link(1e-3, 1e-9)


def measured(split, factor=2.0, batch_size=16):
    """A measurement of this split in which each time is ``factor`` times the predicted one."""
    steps = [factor * split.step_s * wobble for wobble in (0.8, 1.0, 1.0, 1.0, 1.4)]
    hops = [[factor * s] * 5 for s in split.hop_s]
    return MeasuredSplit(
        split.split_points,
        batch_size,
        split.micro_batches,
        split.schedule,
        forward_s=[factor * s for s in split.forward_s],
        backward_s=[factor * s for s in split.backward_s],
        forward_hop_s=hops,
        backward_hop_s=[h if s else [] for h, s in zip(hops, split.backward_hop_s)],
        hop_bytes=list(split.hop_bytes),
        step_s=steps,
        memory_bytes=[int(factor * size) for size in split.memory_bytes],
        held_bytes=[0] * len(split.forward_s),
        trace=_trace(split, factor, steps),
    )


def _trace(split, factor, steps):
    """The slots of the prediction, step after step, each after the mark that begins a step."""
    spans = []
    for start_s in itertools.accumulate([0.0, *steps[:-1]]):
        stages = range(len(split.forward_s))
        spans += [Span(stage, "data", start_s, start_s) for stage in stages]
        for stage, kind, _, begin_s, end_s, _ in split.slots():
            spans.append(Span(stage, kind, start_s + factor * begin_s, start_s + factor * end_s))
    return Trace(tuple(spans))
