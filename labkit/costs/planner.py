"""The costs of layers, the predicted step of a model cut into stages, the best split. No torch.

Forward sends the output of the layer before a cut over it. Backward sends a gradient of the same
size back, unless nothing before the cut is trained.

The model leaves out that stages share a memory bus or a core, and that a small micro-batch costs
more per sample than a large one: the times of a micro-batch are those of the batch divided by M.

Symbols: L layers, P stages, M micro-batches. Times and bytes are of one batch unless stated.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from labkit.costs.link import Link
from labkit.costs.pipeline_timeline import Slot, bubble, predicted_slots
from labkit.schedules.pipeline import in_flight, pipeline_streams
from labkit.schedules.split_points import check_split_points, stage_bounds
from labkit.units import format_count

# Split points of labkit's vgg16, to compare. Layers 0 to 30 are the features (4, 9, 16, 23 and 30
# are pools), 31 averages, 32 flattens, 33 classifies. The first four splits are those of the
# experiment that the course corrects, which did not consider the bytes over each cut.
VGG16_SPLITS: dict[str, tuple[int, ...]] = {
    "1 device": (),
    "2 devices": (31,),
    "3 devices": (31, 33),
    "4 devices": (15, 31, 33),
    "2 devices, after pool 1": (5,),
    "2 devices, after pool 2": (10,),
    "2 devices, after pool 3": (17,),
    "2 devices, after pool 4": (24,),
    "3 devices, after pools 2 and 3": (10, 17),
    "4 devices, after pools 2, 3 and 4": (10, 17, 24),
    "4 devices, even compute": (7, 14, 21),
}
# Training holds these for a parameter: value, gradient, momentum.
_TRAINED_VALUES = 3


@dataclass(frozen=True)
class LayerCost:
    """The costs of one layer for one batch.

    Attributes:
        name: for tables and figures.
        forward_s, backward_s: seconds.
        output_bytes: what the layer passes to the next one; a cut after it sends this.
        parameter_bytes: 0 for a layer without parameters.
        held_bytes: what the layer keeps from its forward to its backward.
    """

    name: str
    forward_s: float
    backward_s: float
    output_bytes: int
    parameter_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class Profile:
    """A model as a list of layer costs.

    Attributes:
        model: its name.
        batch_size: B.
        input_bytes: of the batch that enters layer 0.
        layers: in the order in which they run.
    """

    model: str
    batch_size: int
    input_bytes: int
    layers: tuple[LayerCost, ...]


@dataclass(frozen=True)
class SplitModel:
    """A predicted training step of a split model.

    Attributes:
        split_points: where stages 1 to P - 1 begin.
        schedule: with a single stage per rank; with one micro-batch they are the same.
        micro_batches: M.
        forward_s, backward_s: by stage, seconds for the whole batch.
        hop_bytes: by cut, what the whole batch sends in one direction.
        hop_s: by cut, seconds of these bytes in M messages.
        memory_bytes: by stage, parameters with what training adds to them, and activations held.
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
    first_trained: int

    @property
    def backward_hop_s(self) -> tuple[float, ...]:
        """Seconds of the gradients by cut: ``hop_s``, or 0 where no gradient crosses."""
        frozen = min(self.first_trained, len(self.hop_s))
        return (0.0,) * frozen + self.hop_s[frozen:]

    @functools.cached_property
    def step_s(self) -> float:
        """Seconds from the start of the first forward to the end of the last backward."""
        return max(slot.end_s for slot in self.slots())

    @property
    def bubble(self) -> float:
        """Share of P x ``step_s`` in which a stage does not compute."""
        return bubble(self.slots())

    def slots(self) -> list[Slot]:
        """The timetable of the step; the last slot ends at ``step_s``."""
        num_stages = len(self.forward_s)
        count = self.micro_batches
        return predicted_slots(
            pipeline_streams(self.schedule, num_stages, count, self.first_trained, 1),
            [seconds / count for seconds in self.forward_s],
            [seconds / count for seconds in self.backward_s],
            [seconds / count for seconds in self.hop_s],
        )


def predict_split(
    profile: Profile,
    split_points: Sequence[int],
    link: Link,
    *,
    micro_batches: int = 1,
    schedule: str = "gpipe",
) -> SplitModel:
    """One training step of a split model; its hops follow the alpha-beta model.

    With one micro-batch, all stages and hops run one after another. With more, they overlap as
    the schedule allows, and a transfer occupies no stage.

    Args:
        split_points: layers that begin stages 1 to P - 1; empty for one stage.
        link: between two stages.
        micro_batches: M, at most one per sample.
    """
    points = check_split_points(split_points, len(profile.layers))
    layers, first = _in_training(profile)
    count = min(micro_batches, profile.batch_size)
    held = _held_batches(schedule, len(points) + 1, count)
    forward_s = []
    backward_s = []
    memory_bytes = []
    first_trained = 0
    for stage, (start, end) in enumerate(stage_bounds(points, len(layers))):
        forward_s.append(sum(layer.forward_s for layer in layers[start:end]))
        backward_s.append(sum(layer.backward_s for layer in layers[start:end]))
        memory_bytes.append(_memory_bytes(layers[start:end], held[stage]))
        if end <= first:
            first_trained = stage + 1
    hop_bytes = []
    hop_s = []
    for cut in points:
        hop_bytes.append(layers[cut - 1].output_bytes)
        hop_s.append(count * link.message_seconds(hop_bytes[-1] / count))
    return SplitModel(
        split_points=points,
        schedule=schedule,
        micro_batches=count,
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        hop_bytes=tuple(hop_bytes),
        hop_s=tuple(hop_s),
        memory_bytes=tuple(memory_bytes),
        first_trained=first_trained,
    )


def _held_batches(schedule: str, num_stages: int, micro_batches: int) -> list[float]:
    """Batches whose activations each stage holds at one time."""
    streams = pipeline_streams(schedule, num_stages, micro_batches, stages_per_rank=1)
    return [in_flight(stream) / micro_batches for stream in streams]


def _in_training(profile: Profile) -> tuple[list[LayerCost], int]:
    """The costs of layers in training, and the first trained one: no backward is before it."""
    layers: list[LayerCost] = []
    first = len(profile.layers)
    for index, layer in enumerate(profile.layers):
        if layer.parameter_bytes:
            first = min(first, index)
        if index < first:
            layer = replace(layer, backward_s=0.0, held_bytes=0)
        layers.append(replace(layer, parameter_bytes=layer.parameter_bytes * _TRAINED_VALUES))
    return layers, first


def _memory_bytes(stage: Sequence[LayerCost], batches: float) -> int:
    """Parameters, and the activations of so many batches."""
    held = math.ceil(batches * sum(layer.held_bytes for layer in stage))
    return held + sum(layer.parameter_bytes for layer in stage)


# (stage, start, end) -> the cost of that stage with the layers start to end - 1.
StageCost = Callable[[int, int, int], float]


def best_split(
    profile: Profile,
    num_stages: int,
    link: Link,
    *,
    micro_batches: int = 1,
    schedule: str = "gpipe",
    memory_cap_bytes: float | None = None,
) -> SplitModel:
    """The best of all splits by ``predict_split``, whose other arguments it takes.

    With one micro-batch it is the one with the fewest seconds of hops, by a dynamic program. The
    step of a pipeline is no sum over its stages: of all splits, those are predicted whose largest
    stage takes no longer than the best step so far. ``memory_cap_bytes`` is the limit for every
    stage: ValueError if no split keeps it.
    """
    layers, first = _in_training(profile)
    count = min(micro_batches, profile.batch_size)
    held = _held_batches(schedule, num_stages, count)
    cap_bytes = memory_cap_bytes or math.inf

    def memory_bytes(stage: int, start: int, end: int) -> int:
        return _memory_bytes(layers[start:end], held[stage])

    least, _ = cheapest_cuts(memory_bytes, len(layers), num_stages, max)
    if least > cap_bytes:
        raise ValueError(
            f"no split into {format_count(num_stages, 'stage')} keeps every stage within "
            f"{cap_bytes:,.0f} bytes: the largest stage needs at least {least:,}"
        )

    @functools.cache
    def compute_s(stage: int, start: int, end: int) -> float:
        if memory_bytes(stage, start, end) > cap_bytes:
            return math.inf
        return sum(layer.forward_s + layer.backward_s for layer in layers[start:end])

    def hops_s(stage: int, start: int, end: int) -> float:
        """The messages over the cut before a stage."""
        if memory_bytes(stage, start, end) > cap_bytes:
            return math.inf
        one_way_s = link.message_seconds(layers[start - 1].output_bytes)
        return one_way_s * ((stage > 0) + (start > first))

    def predict(points: Sequence[int]) -> SplitModel:
        return predict_split(profile, points, link, micro_batches=count, schedule=schedule)

    if count == 1:
        _, points = cheapest_cuts(hops_s, len(layers), num_stages, operator.add)
        return predict(points)
    _, points = cheapest_cuts(compute_s, len(layers), num_stages, max)
    best = predict(points)
    for points in itertools.combinations(range(1, len(layers)), num_stages - 1):
        stages = enumerate(stage_bounds(points, len(layers)))
        if max(compute_s(stage, *bound) for stage, bound in stages) <= best.step_s:
            best = min(best, predict(points), key=lambda split: split.step_s)
    return best


def cheapest_cuts(
    cost: StageCost, num_layers: int, num_stages: int, combine: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least combined cost of all stages, and its split points: a dynamic program over cuts.

    rest(s, i) = min over k of combine(cost(s, i, k), rest(s + 1, k)): the best cuts of the layers
    from i on do not depend on the cuts before them. This holds for the sum (``operator.add``) and
    the maximum (``max``). It evaluates P L^2 / 2 costs; ``math.inf`` is one that is not allowed.
    """

    @functools.cache
    def rest(stage: int, start: int) -> tuple[float, tuple[int, ...]]:
        if stage == num_stages - 1:
            return cost(stage, start, num_layers), ()
        candidates = []
        # Each later stage needs a layer.
        for end in range(start + 1, num_layers - num_stages + stage + 2):
            after, points = rest(stage + 1, end)
            candidates.append((combine(cost(stage, start, end), after), (end, *points)))
        return min(candidates)

    return rest(0, 0)
