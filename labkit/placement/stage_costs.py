"""The costs of a model's layers, and of stages made of them.

Symbols: L layers, P stages, M micro-batches, B samples of a batch. Times and bytes are of one
batch unless stated.
"""

import math
from dataclasses import dataclass

from labkit.costs.link import Link
from labkit.costs.makespan import makespan_s
from labkit.schedules.pipeline import in_flight, pipeline_schedule
from labkit.schedules.split_points import stage_bounds
from labkit.units import check_integer

# What training holds for a parameter: value, gradient, momentum.
_TRAINED_VALUES = 3


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for one batch.

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


class StageCosts:
    """The costs of any stage of a model, for one number of stages, link and schedule.

    Stages are given by number and layers, ``start`` to ``end`` - 1. The arguments are those of
    ``planner.best_split``.

    Raises:
        ValueError: impossible settings.
    """

    def __init__(
        self,
        profile: Profile,
        num_stages: int,
        link: Link,
        micro_batches: int,
        schedule: str,
        frozen: int,
    ):
        layers, most = profile.layers, len(profile.layers)
        for name, value, least in (("num_stages", num_stages, 1), ("frozen", frozen, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(
                    f"{name} must be an integer from {least} to {most}, the number of layers of "
                    f"{profile.model}; got {value!r}"
                )
        check_integer("micro_batches", micro_batches)
        self.num_layers, self.num_stages = len(layers), num_stages
        self.micro_batches = micro_batches = min(micro_batches, profile.batch_size)
        self.link, self.schedule = link, schedule
        trained = [i >= frozen and layer.parameter_bytes > 0 for i, layer in enumerate(layers)]
        # Layers before the first trained one have no backward, so they keep nothing for it.
        first = trained.index(True) if any(trained) else self.num_layers
        self.first_trained_layer = first
        self._forward_s = [layer.forward_s for layer in layers]
        self._backward_s = [0.0] * first + [layer.backward_s for layer in layers[first:]]
        self._held_bytes = [0] * first + [layer.held_bytes for layer in layers[first:]]
        self._state_bytes = [
            layer.parameter_bytes * (_TRAINED_VALUES if is_trained else 1)
            for layer, is_trained in zip(layers, trained)
        ]
        self._output_bytes = [layer.output_bytes for layer in layers]
        self._in_flight = [
            in_flight(pipeline_schedule(schedule)(stage, num_stages, micro_batches))
            for stage in range(num_stages)
        ]

    def forward_s(self, start: int, end: int) -> float:
        return sum(self._forward_s[start:end])

    def backward_s(self, start: int, end: int) -> float:
        return sum(self._backward_s[start:end])

    def compute_s(self, stage: int, start: int, end: int) -> float:
        return self.forward_s(start, end) + self.backward_s(start, end)

    def memory_bytes(self, stage: int, start: int, end: int) -> int:
        """Parameters with what training adds to them, and the most activations held at once."""
        held = sum(self._held_bytes[start:end]) * self._in_flight[stage]
        return sum(self._state_bytes[start:end]) + math.ceil(held / self.micro_batches)

    def hop_bytes(self, cut: int) -> int:
        """What a batch sends over the cut before layer ``cut``, in one direction."""
        return self._output_bytes[cut - 1]

    def message_s(self, cut: int) -> float:
        """Seconds of one micro-batch over the cut before layer ``cut``, in one direction."""
        return self.link.message_seconds(self.hop_bytes(cut) / self.micro_batches)

    def round_trip_s(self, cut: int) -> float:
        """Seconds of one micro-batch over the cut, and of its gradient back if there is one."""
        return self.message_s(cut) * (2 if cut > self.first_trained_layer else 1)

    def hops_before_s(self, stage: int, start: int, end: int) -> float:
        """What a stage adds to the hops of a step with one micro-batch: the cut before it."""
        return self.round_trip_s(start) if stage else 0.0

    def through_s(self, stage: int, start: int, end: int) -> float:
        """Seconds of one micro-batch through a stage and over the cut after it, and back."""
        return self.compute_s(stage, start, end) / self.micro_batches + self.round_trip_s(end)

    def first_trained_stage(self, points: tuple[int, ...]) -> int:
        """The first stage with a backward; P if there is none."""
        return sum(end <= self.first_trained_layer for end in (*points, self.num_layers))

    def step_s(self, points: tuple[int, ...]) -> float:
        """Seconds from the start of a split's first forward to the end of its last backward."""
        bounds = stage_bounds(points, self.num_layers)
        return makespan_s(
            self.schedule,
            self.micro_batches,
            [self.forward_s(*bound) / self.micro_batches for bound in bounds],
            [self.backward_s(*bound) / self.micro_batches for bound in bounds],
            [self.message_s(cut) for cut in points],
            self.first_trained_stage(points),
        )
