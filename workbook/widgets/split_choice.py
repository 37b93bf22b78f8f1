"""The choices that the sliders of a split offer, and the model's prediction for each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from labkit.costs.link import Link
from labkit.placement.planner import SplitModel, best_split, predict_split
from labkit.placement.stage_costs import Profile
from labkit.schedules.pipeline import PIPELINES
from labkit.units import format_bytes
from workbook.plots.bucket_overlap import LINKS as NETWORKS
from workbook.plots.split_costs import AxisRange

HERE = "this machine"
# Bytes per second are those of the standards, in one direction: 450e9 is half of what an H100's
# NVLink carries in both directions together (NVIDIA, "H100 Tensor Core GPU Architecture", 2022),
# 31.5e9 are 16 lanes of 16 GT/s with 128b/130b encoding (PCI Express 4.0). The time to start a
# message is only an order of magnitude.
LINKS = {
    "NVLink 4": Link(5e-6, 1 / 450e9),
    "PCIe 4 x16": Link(10e-6, 1 / 31.5e9),
    "10 GbE": NETWORKS["10 Gb/s network"],
    "1 GbE": NETWORKS["1 Gb/s network"],
}


MAX_STAGES = 4
MICRO_BATCHES = (1, 2, 4, 8, 16)
OBJECTIVES = (("shortest step", "step"), ("most even compute", "largest_stage"))


class Choice(NamedTuple):
    """A split, and the settings of its step."""

    points: tuple[int, ...]
    link: str
    micro_batches: int
    schedule: str
    batch_size: int


def check_stages(points: Sequence[int]) -> None:
    """Raise ValueError unless these cuts make as many stages as are shown."""
    if not 1 <= len(points) < MAX_STAGES:
        raise ValueError(f"the explorer shows 2 to {MAX_STAGES} stages, got {len(points) + 1}")


class SplitModels:
    """The predictions for every choice.

    Args:
        measured: the profile of the neural network at one batch size; for other batch sizes, its
            times and bytes are scaled in proportion.
        link: between two stages on this machine; None leaves only ``LINKS``.
        frozen: the number of layers, from the first on, that are not trained.
    """

    def __init__(self, measured: Profile, link: Link | None, frozen: int):
        self.measured, self.frozen = measured, frozen
        self.links = LINKS if link is None else {HERE: link} | LINKS

    def predicted(self, choice: Choice) -> SplitModel:
        return predict_split(self.profile(choice), choice.points, **self._settings(choice))

    def best(self, choice: Choice, objective: str, cap_bytes: float | None) -> SplitModel:
        """The best split into as many stages as ``choice``, with at most the cap per stage."""
        return best_split(
            self.profile(choice),
            len(choice.points) + 1,
            **self._settings(choice),
            objective=objective,
            memory_cap_bytes=cap_bytes,
        )

    def _settings(self, choice: Choice) -> dict[str, Any]:
        return {
            "link": self.links[choice.link],
            "micro_batches": choice.micro_batches,
            "schedule": choice.schedule,
            "frozen": self.frozen,
        }

    def title(self, choice: Choice) -> str:
        text = f"{self.measured.model} in {len(choice.points) + 1} stages over {choice.link}, "
        text += f"batch of {choice.batch_size}"
        if choice.micro_batches > 1:
            text += f" in {choice.micro_batches} ({choice.schedule})"
        size = self.measured.batch_size
        return text if choice.batch_size == size else f"{text}, scaled from {size}"

    def axis_range(self, choice: Choice) -> AxisRange:
        """Upper limits of step, hop and memory over all cuts."""
        profile, link = self.profile(choice), self.links[choice.link]
        largest = max(layer.output_bytes for layer in profile.layers[:-1])
        messages = choice.micro_batches
        hop_s = 2 * messages * link.message_seconds(largest / messages)
        compute_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
        step_s = compute_s + len(choice.points) * hop_s
        return AxisRange(step_s, hop_s, self.whole_bytes(choice))

    def whole_bytes(self, choice: Choice) -> int:
        """The memory of all layers on one stage."""
        whole = predict_split(self.profile(choice), (), Link(0, 0), frozen=self.frozen)
        return whole.memory_bytes[0]

    def profile(self, choice: Choice) -> Profile:
        """The profile at the chosen batch size; the parameters do not depend on it."""
        ratio = choice.batch_size / self.measured.batch_size
        layers = tuple(
            replace(
                layer,
                forward_s=layer.forward_s * ratio,
                backward_s=layer.backward_s * ratio,
                output_bytes=round(layer.output_bytes * ratio),
                held_bytes=round(layer.held_bytes * ratio),
            )
            for layer in self.measured.layers
        )
        input_bytes = round(self.measured.input_bytes * ratio)
        return Profile(self.measured.model, choice.batch_size, input_bytes, layers)


def offered(models: SplitModels, start: Choice) -> dict[str, list]:
    """What each control offers: values, or pairs of a label and a value."""
    size = start.batch_size
    batches = sorted({size // 4, size // 2, size, 2 * size, 4 * size} - {0})
    whole = models.whole_bytes(start._replace(batch_size=batches[-1]))
    caps = [2**power for power in range(max(0, whole.bit_length() - 6), whole.bit_length())]
    most = min(MAX_STAGES, len(models.measured.layers))
    return {
        "stages": list(range(2, most + 1)),
        "link": list(models.links),
        "batch_size": batches,
        "micro_batches": [count for count in MICRO_BATCHES if count <= batches[-1]],
        "schedule": list(PIPELINES),
        "objective": [*OBJECTIVES],
        "cap_bytes": [*((format_bytes(cap), cap) for cap in caps), ("no limit", None)],
    }
