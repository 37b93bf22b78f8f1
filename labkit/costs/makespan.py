"""The length of a pipeline step without its slots, for a search that needs it thousands of times.

The dependencies between a schedule's actions do not change with their seconds. So the actions are
put in order once, by ``costs.pipeline_timeline``, and the length of a step takes one pass over
them. The result equals the end of the last slot bit for bit. Symbols: P stages, M micro-batches.
"""

import functools
from collections.abc import Sequence

from labkit.costs.pipeline_timeline import predicted_slots
from labkit.schedules.pipeline import PIPELINES, Action


def pipeline_streams(
    schedule: str, num_stages: int, micro_batches: int, first_trained: int = 0
) -> list[list[Action]]:
    """The actions of each stage; stages before ``first_trained`` have no backward."""
    streams = [
        list(PIPELINES[schedule](stage, num_stages, micro_batches)) for stage in range(num_stages)
    ]
    for stage in range(first_trained):
        streams[stage] = [action for action in streams[stage] if action.kind == "forward"]
    return streams


def makespan_s(
    schedule: str,
    micro_batches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: Sequence[float],
    first_trained: int = 0,
) -> float:
    """When the last action of a step ends; the first begins at second 0.

    Args:
        schedule: a name in ``schedules.PIPELINES``.
        forward_s, backward_s: by stage, seconds for one micro-batch.
        hop_s: by cut, seconds of one transfer, the same in both directions.
        first_trained: stages before it have no backward.
    """
    seconds, hop_s = (forward_s, backward_s), (*hop_s, 0.0)
    free_s, ended_s = [0.0] * len(forward_s), [0.0]
    for stage, kind, source, cut in _order(schedule, len(forward_s), micro_batches, first_trained):
        ready_s = ended_s[source] + hop_s[cut]
        start_s = ready_s if ready_s > free_s[stage] else free_s[stage]
        free_s[stage] = start_s + seconds[kind][stage]
        ended_s.append(free_s[stage])
    return max(free_s)


@functools.lru_cache(maxsize=256)
def _order(
    schedule: str, num_stages: int, micro_batches: int, first_trained: int
) -> list[tuple[int, int, int, int]]:
    """All actions, each after the actions that it needs: (stage, is a backward, input, cut).

    ``input`` is the place in this list, from 1, of the action whose result it needs; ``cut`` is
    the cut that the result crosses. Place 0 and cut -1 stand for an input that is available
    from the start.
    """
    streams = pipeline_streams(schedule, num_stages, micro_batches, first_trained)
    slots = predicted_slots(streams, [1.0] * num_stages, [1.0] * num_stages)
    slots.sort(key=lambda slot: slot.start_s)
    places = {slot[:3]: place for place, slot in enumerate(slots, 1)}
    order = []
    for stage, kind, micro_batch, *_ in slots:
        backward = kind == "backward"
        neighbour = stage + 1 if backward else stage - 1
        source = places.get((neighbour, kind, micro_batch), 0)
        order.append((stage, int(backward), source, min(stage, neighbour) if source else -1))
    return order
