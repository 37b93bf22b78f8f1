"""A predicted pipeline step: when each stage runs which action, from the schedule and the seconds.

Symbols: P stages, M micro-batches.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from labkit.schedules.pipeline import Action


class Slot(NamedTuple):
    """One action of one stage, with its start and end."""

    stage: int
    kind: str
    micro_batch: int
    start_s: float
    end_s: float


def predicted_slots(
    streams: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: Sequence[float] | None = None,
) -> list[Slot]:
    """Run every action as early as possible: in its stage's order, once its inputs have arrived.

    A forward needs the same micro-batch's forward on the stage before; a backward needs its own
    forward, and its backward on the stage after. A transfer takes time and occupies no stage.

    Args:
        streams: by stage, its actions in order (``schedules.gpipe``, ``one_f_one_b``); frozen
            first stages have no backwards. ValueError for one that can never finish.
        forward_s, backward_s: by stage, seconds for one micro-batch.
        hop_s: by cut, seconds of one transfer, the same in both directions; 0 by default.
    """
    hop_s = hop_s or [0.0] * (len(streams) - 1)
    seconds = {"forward": forward_s, "backward": backward_s}
    slots: list[list[Slot]] = [[] for _ in streams]
    ends_s: dict[tuple[int, Action], float] = {}
    todo = [deque(stream) for stream in streams]

    def arrival_s(stage: int, action: Action) -> float | None:
        """When the inputs of an action have arrived; None before that is known."""
        is_backward = action.kind == "backward"
        beside = stage + 1 if is_backward else stage - 1
        needs = {(stage, Action("forward", action.micro_batch)): 0.0} if is_backward else {}
        if 0 <= beside < len(streams):
            needs[beside, action] = hop_s[min(stage, beside)]
        if not needs.keys() <= ends_s.keys():
            return None
        return max([ends_s[need] + hop for need, hop in needs.items()], default=0.0)

    while any(todo):
        before = len(ends_s)
        for stage, actions in enumerate(todo):
            while actions and (start_s := arrival_s(stage, actions[0])) is not None:
                action = actions.popleft()
                if slots[stage]:
                    start_s = max(start_s, slots[stage][-1].end_s)
                end_s = start_s + seconds[action.kind][stage]
                ends_s[stage, action] = end_s
                slots[stage].append(Slot(stage, *action, start_s, end_s))
        if len(ends_s) == before:
            stuck = [f"stage {stage} at {rest[0]}" for stage, rest in enumerate(todo) if rest]
            raise ValueError(f"these streams can never finish: {', '.join(stuck)}")
    return [slot for row in slots for slot in row]


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
