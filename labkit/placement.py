"""Where to cut a model into stages: what a split costs, and the best one. Pure, no torch.

A **split point** k means that a stage begins with layer k; P - 1 of them make P stages. What
crosses a cut is the output of the layer before it, forward, and a gradient of the same size,
backward, unless nothing before the cut is trained.

Symbols: L layers, P stages, M micro-batches, B samples of a batch. Times and bytes are those of
one batch, if nothing else is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Split points of labkit's vgg16: layers 0 to 30 are its features (pools are layers 4, 9, 16, 23
# and 30), 31 averages, 32 flattens, 33 classifies. The first four are those of the experiment
# that the course corrects, whose cuts nobody chose for the bytes that cross them; the others use
# as many devices and cut elsewhere.
VGG16_PLACEMENTS: dict[str, tuple[int, ...]] = {
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


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for one batch.

    Attributes:
        name: for people.
        forward_s, backward_s: seconds.
        output_bytes: what it hands to the next layer; a cut behind it sends this.
        parameter_bytes: of its values; 0 if it has none, and then it trains nothing.
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


@dataclass(frozen=True)
class SplitModel:
    """A training step of a split model on paper.

    Attributes:
        split_points: where stages 1 to P - 1 begin.
        schedule: "gpipe" or "1f1b"; with one micro-batch they are the same.
        micro_batches: M.
        forward_s, backward_s: by stage, seconds of the whole batch.
        hop_bytes: by cut, what a whole batch sends in one direction.
        hop_s: by cut, seconds of these bytes in M messages, one direction.
        memory_bytes: by stage, parameters with what training adds, and activations held.
        step_s: from the first forward to the last backward.
        bubble: share of stages x step in which a stage does not compute.
        first_trained: the first stage with a backward pass; P if there is none. A cut carries
            gradients if a stage before it has one.
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
        """By cut, seconds of the gradients: ``hop_s``, or 0 where none crosses."""
        return tuple(s if cut >= self.first_trained else 0.0 for cut, s in enumerate(self.hop_s))


def check_split_points(
    split_points: Sequence[int], num_layers: int, num_stages: int | None = None
) -> tuple[int, ...]:
    """Split points as a tuple, if they cut ``num_layers`` layers into stages of 1 or more.

    Args:
        split_points: layers that begin a stage, in order; none of them for one stage.
        num_layers: L; split points go from 1 to L - 1.
        num_stages: P, where it is given by the number of ranks or devices.

    Raises:
        ValueError: out of range, out of order, twice, no whole number, not P - 1 of them.
    """
    points = tuple(split_points)
    shown = ", ".join(map(str, points))
    for point in points:
        if isinstance(point, bool) or not isinstance(point, int):
            raise ValueError(f"split point {point!r} is no whole number: it counts layers from 0")
        if not 1 <= point < num_layers:
            raise ValueError(
                f"split point {point} leaves a stage without layers: with {num_layers} layers "
                + (f"it is 1 to {num_layers - 1}" if num_layers > 1 else "there is nothing to cut")
            )
    for before, after in zip(points, points[1:]):
        if before == after:
            raise ValueError(f"split point {before} comes twice in {shown}: give each once")
        if before > after:
            raise ValueError(f"split points {shown} are out of order: {after} follows {before}")
    if num_stages is not None and len(points) != num_stages - 1:
        raise ValueError(
            f"{len(points)} split points ({shown or 'none'}) make {len(points) + 1} stages, but "
            f"{num_stages} are wanted: give {num_stages - 1}"
        )
    return points


def stage_bounds(split_points: Sequence[int], num_layers: int) -> list[tuple[int, int]]:
    """By stage, its layers as (start, end), end excluded.

    Raises:
        ValueError: as ``check_split_points``.
    """
    points = check_split_points(split_points, num_layers)
    return list(zip((0, *points), (*points, num_layers)))
