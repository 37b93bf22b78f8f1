"""The length of a pipeline step alone: a search for the best split needs it thousands of times."""

import functools
from collections.abc import Sequence

from labkit.costs.pipeline_timeline import Step, ends_s, in_order
from labkit.schedules.pipeline import PIPELINES, Action


def pipeline_streams(
    schedule: str, num_stages: int, micro_batches: int, first_trained: int = 0
) -> list[list[Action]]:
    """The actions of each stage; stages before ``first_trained`` have no backward."""
    return [
        [
            action
            for action in PIPELINES[schedule](stage, num_stages, micro_batches)
            if action.kind == "forward" or stage >= first_trained
        ]
        for stage in range(num_stages)
    ]


def makespan_s(
    schedule: str,
    micro_batches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: Sequence[float],
    first_trained: int = 0,
) -> float:
    """When the last action of a step ends; the other arguments are those of ``predicted_slots``.

    Args:
        schedule: a name in ``schedules.PIPELINES``.
        first_trained: stages before it have no backward.
    """
    steps = _steps(schedule, len(forward_s), micro_batches, first_trained)
    _, of_stages = ends_s(steps, forward_s, backward_s, hop_s)
    return max(of_stages)


@functools.lru_cache(maxsize=256)
def _steps(schedule: str, stages: int, micro_batches: int, first_trained: int) -> list[Step]:
    streams = pipeline_streams(schedule, stages, micro_batches, first_trained)
    return list(in_order(streams).values())
