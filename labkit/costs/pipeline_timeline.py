"""The bubble of a pipeline, from a timetable and by the formula; when its hops are hidden.

Symbols: P stages, M micro-batches.
"""

import math
from collections.abc import Sequence

from labkit.costs.link import Link
from labkit.schedules.timetable import Slot as Slot, predicted_slots as predicted_slots


def bubble(slots: Sequence[Slot]) -> float:
    """The share of all stages' time in which they are idle, 0 to 1."""
    if not slots:
        return 0.0
    stages = len({slot.rank for slot in slots})
    makespan_s = max(slot.end_s for slot in slots) - min(slot.start_s for slot in slots)
    busy_s = sum(slot.end_s - slot.start_s for slot in slots)
    return 1 - busy_s / (stages * makespan_s) if makespan_s else 0.0


def bubble_formula(num_stages: int, num_micro_batches: int) -> float:
    """(P - 1) / (M + P - 1): the bubble of equal stages and free transfers, GPipe or 1F1B.

    Source: Huang et al., "GPipe" (2019), section 2.3.
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def micro_batches_for_bubble(num_stages: int, most: float) -> int:
    """The fewest micro-batches whose bubble is at most ``most``: M >= (P - 1) (1 - x) / x."""
    if not 0 < most < 1:
        raise ValueError(f"a bubble of {most}: give a share above 0 and below 1, such as 0.1")
    # Less a rounding error, so that 3 stages and a third make 4, not 5.
    needed = (num_stages - 1) * (1 - most) / most - 1e-9
    return max(1, math.ceil(needed))


def samples_that_hide_hop(link: Link, sample_bytes: float, sample_s: float) -> float:
    """Samples per micro-batch from which a forward is as long as the hop beside it.

    alpha + s b beta <= t b, solved for b: ``sample_s`` is t, a stage's forward of one sample,
    ``sample_bytes`` is s, what crosses the cut. ``math.inf`` if the bytes alone take longer.
    """
    left_s = sample_s - sample_bytes * link.beta_s_per_byte
    if left_s <= 0:
        return math.inf
    return link.alpha_s / left_s
