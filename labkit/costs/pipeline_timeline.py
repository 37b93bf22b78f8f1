"""A predicted pipeline step: when each stage runs which action, from the schedule and the seconds.

The order in which actions need each other does not depend on their seconds: ``in_order`` finds it
once, ``ends_s`` is one pass over it. Symbols: P stages, M micro-batches.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from labkit.schedules.pipeline import Action
from labkit.units import format_count


class Slot(NamedTuple):
    """One action of one stage, with its start and end."""

    stage: int
    kind: str
    micro_batch: int
    start_s: float
    end_s: float


# What an action needs: (stage, 1 for a backward or 0, input, cut). ``input`` is the place, from 1,
# of the neighbour's action whose result it needs, ``cut`` what this crosses; 0 and -1 for an input
# that is there from the start. A plain tuple: ``best_split`` goes through thousands of them.
Step = tuple[int, int, int, int]


def predicted_slots(
    streams: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: Sequence[float] | None = None,
) -> list[Slot]:
    """Run every action as early as possible: in its stage's order, once its inputs have arrived.

    A transfer takes time and occupies no stage.

    Args:
        streams: by stage, its actions in order (``schedules.gpipe``, ``one_f_one_b``); frozen
            first stages have no backwards.
        forward_s, backward_s: by stage, seconds for one micro-batch.
        hop_s: by cut, seconds of one transfer, the same in both directions; 0 by default.

    Returns:
        The slots, stage after stage.

    Raises:
        ValueError: as ``in_order``; or seconds are missing for a stage or a cut.
    """
    stages = len(streams)
    hop_s = hop_s or [0.0] * (stages - 1)
    given = {"forward_s": forward_s, "backward_s": backward_s, "hop_s": hop_s}
    for name, seconds in given.items():
        expected = stages - (name == "hop_s")
        if len(seconds) != expected:
            with_stages = format_count(stages, "stage")
            raise ValueError(
                f"{name} has length {len(seconds)}: with {with_stages} give {expected}"
            )
    steps = in_order(streams)
    ends, _ = ends_s(steps.values(), forward_s, backward_s, hop_s)
    slots, free_s = [], [0.0] * stages
    for ((stage, action), (*_, source, cut)), end_s in zip(steps.items(), ends[1:]):
        ready_s = ends[source] + (hop_s[cut] if source else 0.0)
        slots.append(Slot(stage, *action, max(ready_s, free_s[stage]), end_s))
        free_s[stage] = end_s
    return sorted(slots, key=lambda slot: slot.stage)


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


def in_order(streams: Sequence[Sequence[Action]]) -> dict[tuple[int, Action], Step]:
    """The actions of all stages, each after those that it needs.

    A forward needs the same micro-batch's forward on the stage before; a backward needs its own
    forward, and its backward on the stage after.

    Raises:
        ValueError: a stream repeats an action, or waits for one that never runs.
    """
    steps: dict[tuple[int, Action], Step] = {}
    places: dict[tuple[int, Action], int] = {}

    def missing(stage: int, action: Action) -> list[tuple[int, Action]]:
        needs = [(stage - 1, action)]
        if action.kind == "backward":
            needs = [(stage, Action("forward", action.micro_batch)), (stage + 1, action)]
        return [need for need in needs if 0 <= need[0] < len(streams) and need not in steps]

    todo = [deque(stream) for stream in streams]
    while any(todo):
        before = len(steps)
        for stage, actions in enumerate(todo):
            while actions and not missing(stage, actions[0]):
                action = actions.popleft()
                if (stage, action) in steps:
                    raise ValueError(f"stage {stage} runs {action} more than once")
                backward = action.kind == "backward"
                neighbour = stage + 1 if backward else stage - 1
                source = places.get((neighbour, action), 0)
                cut = min(stage, neighbour) if source else -1
                steps[stage, action] = (stage, int(backward), source, cut)
                places[stage, action] = len(steps)
        if len(steps) == before:
            waits = []
            for stage, actions in enumerate(todo):
                if actions:
                    needs = [
                        f"its own {need}" if of == stage else f"{need} of stage {of}"
                        for of, need in missing(stage, actions[0])
                    ]
                    waits.append(f"stage {stage} cannot run {actions[0]} before ")
                    waits[-1] += " and ".join(needs)
            raise ValueError(f"these streams can never finish: {'; '.join(waits)}")
    return steps


def ends_s(
    steps: Iterable[Step],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: Sequence[float],
) -> tuple[list[float], list[float]]:
    """When each step of ``in_order`` ends, by its place (0 at place 0); when each stage does."""
    seconds, hop_s = (forward_s, backward_s), (*hop_s, 0.0)
    free_s, ended_s = [0.0] * len(forward_s), [0.0]
    for stage, backward, source, cut in steps:
        ready_s, stage_s = ended_s[source] + hop_s[cut], free_s[stage]
        end_s = (ready_s if ready_s > stage_s else stage_s) + seconds[backward][stage]
        free_s[stage] = end_s
        ended_s.append(end_s)
    return ended_s, free_s
