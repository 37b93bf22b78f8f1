"""The predicted cost of a split, and the best split. No torch.

Forward sends the output of the layer before a cut over it. Backward sends a gradient of the same
size back, unless nothing before the cut is trained.

The model leaves out that stages share a memory bus or a core, and that a small micro-batch costs
more per sample than a large one: the times of a micro-batch are those of the batch divided by M.

Symbols: L layers, P stages, M micro-batches. Times and bytes are of one batch unless stated.
"""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.costs.link import Link
from labkit.costs.makespan import pipeline_streams
from labkit.costs.pipeline_timeline import Slot, predicted_slots
from labkit.placement.search import StageCost, cheapest_cuts, cheapest_rest, search_cuts
from labkit.placement.stage_costs import Profile, StageCosts
from labkit.schedules.split_points import check_split_points, stage_bounds
from labkit.units import check_choice, format_bytes, format_count

OBJECTIVES = ("step", "largest_stage")


@dataclass(frozen=True)
class SplitModel:
    """A predicted training step of a split model.

    Attributes:
        split_points: where stages 1 to P - 1 begin.
        schedule: "gpipe" or "1f1b"; with one micro-batch they are the same.
        micro_batches: M.
        forward_s, backward_s: by stage, seconds for the whole batch.
        hop_bytes: by cut, what the whole batch sends in one direction.
        hop_s: by cut, seconds of these bytes in M messages.
        memory_bytes: by stage, parameters with what training adds to them, and activations held.
        step_s: from the start of the first forward to the end of the last backward.
        bubble: share of P x step_s in which a stage does not compute.
        first_trained: the first stage with a backward; P if there is none. The cuts after it carry
            gradients.
    """

    split_points: tuple[int, ...]
    schedule: str
    micro_batches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    hop_bytes: tuple[int, ...]
    hop_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    step_s: float
    bubble: float
    first_trained: int = 0

    @property
    def backward_hop_s(self) -> tuple[float, ...]:
        """By cut, seconds of the gradients: ``hop_s``, or 0 where no gradient crosses."""
        return tuple(s if cut >= self.first_trained else 0.0 for cut, s in enumerate(self.hop_s))

    def slots(self) -> list[Slot]:
        """When each stage does what; the last slot ends at ``step_s``."""
        stages, micro_batches = len(self.forward_s), self.micro_batches
        streams = pipeline_streams(self.schedule, stages, micro_batches, self.first_trained)
        times = [self.forward_s, self.backward_s, self.hop_s]
        return predicted_slots(
            streams, *([s / micro_batches for s in by_part] for by_part in times)
        )


def predict_split(
    profile: Profile,
    split_points: Sequence[int],
    link: Link,
    *,
    micro_batches: int = 1,
    schedule: str = "gpipe",
    frozen: int = 0,
) -> SplitModel:
    """One training step of a split model; its hops follow the alpha-beta model.

    With one micro-batch, all stages and hops run one after another. With more, they overlap as
    the schedule allows, and a transfer occupies no stage.

    Args:
        profile: costs of the layers.
        split_points: layers that begin stages 1 to P - 1; empty for one stage.
        link: between two stages.
        micro_batches: M, at most one per sample.
        schedule: "gpipe" or "1f1b".
        frozen: the number of layers, from the first on, that are not trained. Layers before the
            first trained parameter have no backward, and a cut before it carries no gradient.

    Raises:
        ValueError: impossible split points or settings; the message says which are possible.
    """
    points = check_split_points(split_points, len(profile.layers))
    costs = StageCosts(profile, len(points) + 1, link, micro_batches, schedule, frozen)
    return _predict(costs, points)


def best_split(
    profile: Profile,
    num_stages: int,
    link: Link,
    *,
    objective: str = "step",
    micro_batches: int = 1,
    schedule: str = "gpipe",
    memory_cap_bytes: float | None = None,
    frozen: int = 0,
) -> SplitModel:
    """The best of all splits by ``predict_split``; of equal ones, that with the earliest cuts.

    The result is exact. "largest_stage", and "step" with one micro-batch (which only has to
    minimise the hops, as the sum of the compute is always the same), are dynamic programs. The
    step of a pipeline is not a sum over its stages: branch and bound finds the best split,
    quickly for 4 stages, perhaps slowly for many more.

    Args:
        profile, link, micro_batches, schedule, frozen: as in ``predict_split``.
        num_stages: P.
        objective: "step" minimises the step; "largest_stage" minimises the compute of the
            slowest stage, which limits a long pipeline.
        memory_cap_bytes: the limit for every stage; None for no limit.

    Raises:
        ValueError: more stages than layers, impossible settings, or a cap that no split keeps
            (the message names the smallest possible cap).
    """
    check_choice("objective", objective, OBJECTIVES)
    costs = StageCosts(profile, num_stages, link, micro_batches, schedule, frozen)
    sizes = costs.num_layers, costs.num_stages
    if memory_cap_bytes is not None:
        least = cheapest_rest(costs.memory_bytes, *sizes, max)[0][0]
        if least > memory_cap_bytes:
            raise ValueError(
                f"no split into {format_count(num_stages, 'stage')} keeps every stage within "
                f"{memory_cap_bytes:,.0f} bytes ({format_bytes(memory_cap_bytes)}): the least "
                f"that the largest stage can need is {least:,} ({format_bytes(least)}). Raise the "
                "cap, or take more stages or a smaller batch"
            )
    compute_s = _capped(costs.compute_s, costs, memory_cap_bytes)
    if objective == "largest_stage":
        points = cheapest_cuts(compute_s, *sizes, max)
    elif micro_batches == 1:
        hops_s = _capped(costs.hops_before_s, costs, memory_cap_bytes)
        points = cheapest_cuts(hops_s, *sizes, operator.add)
    else:
        through_s = functools.cache(costs.through_s)
        points = search_cuts(compute_s, through_s, costs.step_s, *sizes)
    return _predict(costs, points)


def _predict(costs: StageCosts, points: tuple[int, ...]) -> SplitModel:
    bounds = stage_bounds(points, costs.num_layers)
    step_s = costs.step_s(points)
    busy_s = sum(costs.compute_s(stage, *bound) for stage, bound in enumerate(bounds))
    return SplitModel(
        points,
        costs.schedule,
        costs.micro_batches,
        forward_s=tuple(costs.forward_s(*bound) for bound in bounds),
        backward_s=tuple(costs.backward_s(*bound) for bound in bounds),
        hop_bytes=tuple(costs.hop_bytes(cut) for cut in points),
        hop_s=tuple(costs.micro_batches * costs.message_s(cut) for cut in points),
        memory_bytes=tuple(costs.memory_bytes(s, *bound) for s, bound in enumerate(bounds)),
        step_s=step_s,
        bubble=1 - busy_s / (len(bounds) * step_s) if step_s else 0.0,
        first_trained=costs.first_trained_stage(points),
    )


def _capped(cost: StageCost, costs: StageCosts, cap_bytes: float | None) -> StageCost:
    """``cost`` with a cache, infinite for a stage that needs more memory than the cap."""
    if cap_bytes is None:
        return functools.cache(cost)

    def capped(stage: int, start: int, end: int) -> float:
        fits = costs.memory_bytes(stage, start, end) <= cap_bytes
        return cost(stage, start, end) if fits else math.inf

    return functools.cache(capped)
