"""A predicted pipeline step: when each stage runs which action, from the schedule and the seconds.

The course shows this model beside the real run. It also finds schedules that can never finish,
before any process is started. Symbols: P stages, M micro-batches.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from labkit.schedules.pipeline import Action
from labkit.units import format_count

# (stage, action) -> when it has ended.
_Ended = dict[tuple[int, Action], float]


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

    A forward needs the same micro-batch's forward on the stage before; a backward needs its
    backward on the stage after, and its forward on the same stage. A transfer takes time and
    occupies no stage. Stages before the first trained one have no backwards in their streams.

    Args:
        streams: by stage, its actions in order (``schedules.gpipe``, ``one_f_one_b``).
        forward_s, backward_s: by stage, seconds for one micro-batch.
        hop_s: by cut, seconds of one transfer, the same in both directions; 0 by default.

    Returns:
        The slots, stage after stage.

    Raises:
        ValueError: a stream lacks an action, repeats one, or waits for an action that never runs
            (the message names stages and actions); or seconds are missing for a stage or a cut.
    """
    _check_streams(streams)
    hop_s = hop_s or [0.0] * (len(streams) - 1)
    _check_seconds(len(streams), forward_s=forward_s, backward_s=backward_s, hop_s=hop_s)
    todo = [deque(stream) for stream in streams]
    slots: list[list[Slot]] = [[] for _ in streams]
    free_s = [0.0] * len(streams)
    ended: _Ended = {}
    while left := sum(map(len, todo)):
        for stage, actions in enumerate(todo):
            while actions and (ready_s := _ready_s(ended, stage, actions[0], hop_s)) is not None:
                action = actions.popleft()
                start_s = max(ready_s, free_s[stage])
                seconds = forward_s[stage] if action.kind == "forward" else backward_s[stage]
                free_s[stage] = ended[stage, action] = start_s + seconds
                slots[stage].append(Slot(stage, *action, start_s, free_s[stage]))
        if sum(map(len, todo)) == left:
            raise ValueError(_standstill(todo, ended))
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


def _ready_s(ended: _Ended, stage: int, action: Action, hop_s: Sequence[float]) -> float | None:
    """When all inputs of an action have arrived; None if one is still missing."""
    ready_s = 0.0
    for source, needed in _needs(stage, action, len(hop_s) + 1):
        if (source, needed) not in ended:
            return None
        transfer_s = hop_s[min(source, stage)] if source != stage else 0.0
        ready_s = max(ready_s, ended[source, needed] + transfer_s)
    return ready_s


def _needs(stage: int, action: Action, num_stages: int) -> list[tuple[int, Action]]:
    """The (stage, action) pairs that must have ended before this action."""
    if action.kind == "forward":
        return [(stage - 1, action)] if stage > 0 else []
    own = (stage, Action("forward", action.micro_batch))
    return [own, (stage + 1, action)] if stage + 1 < num_stages else [own]


def _check_streams(streams: Sequence[Sequence[Action]]) -> None:
    """Raise ValueError unless all stages run the same actions, once each."""
    wanted = {action for stream in streams for action in stream}
    forwards = {action for action in wanted if action.kind == "forward"}
    frozen = True
    for stage, stream in enumerate(streams):
        # The first stages may be frozen, and have no backward.
        frozen = frozen and all(action.kind == "forward" for action in stream)
        repeated = sorted({action for action in stream if stream.count(action) > 1})
        lacking = sorted((forwards if frozen else wanted) - set(stream))
        for problem, actions in (("more than once", repeated), ("never", lacking)):
            if actions:
                raise ValueError(f"stage {stage} runs {', '.join(map(str, actions))} {problem}")


def _check_seconds(num_stages: int, **seconds: Sequence[float]) -> None:
    """Raise ValueError unless there is a number for each stage, or each cut."""
    for name, given in seconds.items():
        wanted = num_stages - (name == "hop_s")
        if len(given) != wanted:
            raise ValueError(
                f"{name} has length {len(given)}: with {format_count(num_stages, 'stage')} give "
                f"{wanted}"
            )


def _standstill(todo: Sequence[Sequence[Action]], ended: _Ended) -> str:
    """Which stage waits for which action when no stage can continue."""
    waits = []
    for stage, actions in enumerate(todo):
        if not actions:
            continue
        needs = [
            f"{needed} of stage {source}" if source != stage else f"its own {needed}"
            for source, needed in _needs(stage, actions[0], len(todo))
            if (source, needed) not in ended
        ]
        waits.append(f"stage {stage} cannot run {actions[0]} before {' and '.join(needs)}")
    return f"these streams can never finish: {'; '.join(waits)}"
