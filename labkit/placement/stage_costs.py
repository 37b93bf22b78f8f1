"""What the layers of a model cost, and what stages made of them cost on paper.

Symbols: L layers, P stages, M micro-batches, B samples of a batch. Times and bytes are those of
one batch, if nothing else is said.
"""

import math
import sys
from dataclasses import dataclass

from labkit.costs.link import Link
from labkit.costs.makespan import makespan_s
from labkit.schedules.pipeline import PIPELINES, in_flight
from labkit.schedules.stages import stage_bounds

# What training holds of a parameter: its value, its gradient, its momentum.
_TRAINED_VALUES = 3


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for one batch.

    Attributes:
        name: for people.
        forward_s, backward_s: seconds.
        output_bytes: what it hands to the next layer; a cut behind it sends this.
        parameter_bytes: of its values; 0 if it has none, and then there is nothing to train.
        held_bytes: what it keeps from forward until its backward.
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
        batch_size: B, the samples that all costs are for.
        input_bytes: of the batch that enters layer 0.
        layers: in the order in which they run.
    """

    model: str
    batch_size: int
    input_bytes: int
    layers: tuple[LayerCost, ...]


class StageCosts:
    """What any stage of a model costs, for one number of stages, link and schedule.

    A stage is given by its number and its layers, ``start`` to ``end`` - 1.

    Args:
        profile: costs of the layers.
        num_stages: P.
        link: between two stages.
        micro_batches: M; a batch of fewer samples makes as many.
        schedule: a name out of ``schedules.PIPELINES``.
        frozen: so many layers from the first on are not trained.

    Raises:
        ValueError: settings that no split can have.
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
        _check_settings(profile, num_stages, micro_batches, schedule, frozen)
        layers = profile.layers
        self.num_layers, self.num_stages = len(layers), num_stages
        self.micro_batches = micro_batches = min(micro_batches, profile.batch_size)
        self.link, self.schedule = link, schedule
        trained = [i >= frozen and layer.parameter_bytes > 0 for i, layer in enumerate(layers)]
        # Nothing before the first trained layer needs a gradient, so nothing is held for one.
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
            in_flight(PIPELINES[schedule](stage, num_stages, micro_batches))
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
        """One micro-batch over the cut before layer ``cut``, in one direction."""
        return self.link.message_seconds(self.hop_bytes(cut) / self.micro_batches)

    def round_trip_s(self, cut: int) -> float:
        """One micro-batch over the cut, and its gradient back if there is one."""
        return self.message_s(cut) * (2 if cut > self.first_trained_layer else 1)

    def hops_before_s(self, stage: int, start: int, end: int) -> float:
        """What a stage adds to the hops of the one micro-batch of an unpipelined step."""
        return self.round_trip_s(start) if stage else 0.0

    def through_s(self, stage: int, start: int, end: int) -> float:
        """One micro-batch through a stage and over the cut behind it, and back."""
        return self.compute_s(stage, start, end) / self.micro_batches + self.round_trip_s(end)

    def first_trained_stage(self, points: tuple[int, ...]) -> int:
        """The first stage with a backward; P if there is none."""
        return sum(end <= self.first_trained_layer for end in (*points, self.num_layers))

    def step_s(self, points: tuple[int, ...]) -> float:
        """From the first forward to the last backward of a split."""
        bounds = stage_bounds(points, self.num_layers)
        return makespan_s(
            self.schedule,
            self.micro_batches,
            [self.forward_s(*bound) / self.micro_batches for bound in bounds],
            [self.backward_s(*bound) / self.micro_batches for bound in bounds],
            [self.message_s(cut) for cut in points],
            self.first_trained_stage(points),
        )


def _check_settings(profile, num_stages, micro_batches, schedule, frozen) -> None:
    num_layers = len(profile.layers)
    so_many = f"to {num_layers}, the layers of {profile.model}"
    _check_whole("num_stages", num_stages, range(1, num_layers + 1), so_many)
    _check_whole("micro_batches", micro_batches, range(1, sys.maxsize), "up")
    _check_whole("frozen", frozen, range(num_layers + 1), so_many)
    if schedule not in PIPELINES:
        raise ValueError(f"unknown schedule {schedule!r}: choose one of {', '.join(PIPELINES)}")


def _check_whole(name: str, value: int, allowed: range, until: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        raise ValueError(
            f"{name} must be a whole number from {allowed.start} {until}; got {value!r}"
        )
