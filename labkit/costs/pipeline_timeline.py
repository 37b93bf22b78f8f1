"""When each stage of a pipeline does what: instruction streams and seconds in, a timetable out.

It is the model that stands beside a real run, and it finds streams that can never finish before
anything is started. Symbols: P stages, M micro-batches.
"""

from collections.abc import Sequence
from typing import NamedTuple

from labkit.schedules.pipeline import Action
from labkit.units import format_count


class Slot(NamedTuple):
    """One action of one stage, from when to when."""

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
    """Every action as early as it can be: in the order of its stage, when its input is there.

    A forward needs that of the stage before, a backward that of the stage behind and the stage's
    own forward. A transfer takes time and occupies nobody. Where no stage runs a backward (nothing
    is trained before the stage behind), streams leave it out.

    Args:
        streams: by stage, its actions in order (``schedules.gpipe``, ``one_f_one_b``).
        forward_s, backward_s: by stage, seconds for one micro-batch.
        hop_s: by cut, seconds from a stage to the next one and back; none by default.

    Returns:
        The slots, stage after stage.

    Raises:
        ValueError: a stream lacks an action, repeats one, or waits for what comes never; the
            message names stages and actions. Or seconds are missing for a stage or a cut.
    """
    _check_streams(streams)
    hop_s = hop_s or [0.0] * (len(streams) - 1)
    _check_seconds(len(streams), forward_s=forward_s, backward_s=backward_s, hop_s=hop_s)
    ended: dict[tuple[int, Action], float] = {}
    free_s = [0.0] * len(streams)
    slots: list[list[Slot]] = [[] for _ in streams]
    left = sum(map(len, streams))
    while left:
        before = left
        for stage, stream in enumerate(streams):
            while len(slots[stage]) < len(stream):
                action = stream[len(slots[stage])]
                ready_s = _ready_s(ended, stage, action, streams, hop_s)
                if ready_s is None:
                    break
                start_s = max(ready_s, free_s[stage])
                seconds = forward_s[stage] if action.kind == "forward" else backward_s[stage]
                free_s[stage] = ended[stage, action] = start_s + seconds
                slots[stage].append(Slot(stage, *action, start_s, free_s[stage]))
                left -= 1
        if left == before:
            raise ValueError(_standstill(streams, slots, ended, hop_s))
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
    """(P - 1) / (M + P - 1): ``bubble`` of equal stages and free transfers, either schedule.

    Source: Huang et al., "GPipe" (2019), section 2.3.
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def _needs(stage: int, action: Action, streams: Sequence) -> list[tuple[int, Action, int | None]]:
    """What must have ended: (stage, action, the cut that lies between, if one does)."""
    kind, micro_batch = action
    if kind == "forward":
        return [(stage - 1, action, stage - 1)] if stage > 0 else []
    needs = [(stage, Action("forward", micro_batch), None)]
    return needs + ([(stage + 1, action, stage)] if stage + 1 < len(streams) else [])


def _ready_s(ended: dict, stage: int, action: Action, streams, hop_s) -> float | None:
    """When the inputs are there; None while one is not."""
    ready_s = 0.0
    for source, needed, cut in _needs(stage, action, streams):
        if (source, needed) not in ended:
            return None
        ready_s = max(ready_s, ended[source, needed] + (0.0 if cut is None else hop_s[cut]))
    return ready_s


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
                f"{name} has length {len(given)}, for {format_count(num_stages, 'stage')} it has "
                f"to be {wanted}"
            )


def _standstill(streams, slots, ended, hop_s) -> str:
    """Who waits for what when nothing can go on."""
    waits = []
    for stage, stream in enumerate(streams):
        if len(slots[stage]) == len(stream):
            continue
        action = stream[len(slots[stage])]
        needs = [
            f"{needed} of stage {source}" if source != stage else f"its own {needed}"
            for source, needed, _ in _needs(stage, action, streams)
            if (source, needed) not in ended
        ]
        waits.append(f"stage {stage} stands before {action} and needs {' and '.join(needs)}")
    return f"these streams can never finish: {'; '.join(waits)}"
