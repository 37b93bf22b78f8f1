"""The bubble of a pipeline, from a timetable and by the formula.

Symbols: P stages, M micro-batches.
"""

from collections.abc import Sequence

from labkit.schedules.timetable import Slot as Slot, predicted_slots as predicted_slots


def bubble(slots: Sequence[Slot]) -> float:
    """The share of all stages' time in which they are idle, 0 to 1."""
    if not slots:
        return 0.0
    stages = len({slot.stage for slot in slots})
    makespan_s = max(slot.end_s for slot in slots) - min(slot.start_s for slot in slots)
    busy_s = sum(slot.end_s - slot.start_s for slot in slots)
    return 1 - busy_s / (stages * makespan_s) if makespan_s else 0.0


def bubble_formula(num_stages: int, num_micro_batches: int) -> float:
    """(P - 1) / (M + P - 1): the bubble of equal stages and free transfers, GPipe or 1F1B.

    Source: Huang et al., "GPipe" (2019), section 2.3.
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)
