"""What stands behind the sliders of a split: its model over any link, at any batch size, drawn."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from labkit import plots
from labkit.costs.link import Link
from labkit.placement.planner import SplitModel, best_split, predict_split
from labkit.placement.stage_costs import Profile
from labkit.plots.buckets import LINKS as NETWORKS
from labkit.plots.placement import Reach, split_words
from labkit.training.split_run import MeasuredSplit

HERE = "this machine"
# Bytes a second are those of the standards, one way: 450e9 is half of what an H100's NVLink
# carries both ways together (NVIDIA, "H100 Tensor Core GPU Architecture", 2022), 31.5e9 are 16
# lanes of 16 GT/s with 128b/130b encoding (PCI Express 4.0). What a message takes however short
# it is, is an order of magnitude.
LINKS = {
    "NVLink 4": Link(5e-6, 1 / 450e9),
    "PCIe 4 x16": Link(10e-6, 1 / 31.5e9),
    "10 GbE": NETWORKS["10 Gb/s network"],
    "1 GbE": NETWORKS["1 Gb/s network"],
}


class Choice(NamedTuple):
    """A split, and what it is to run on."""

    points: tuple[int, ...]
    link: str
    micro_batches: int
    schedule: str
    batch_size: int

    @property
    def here(self) -> "Choice":
        """The same split on this machine, which is where it is measured."""
        return self._replace(link=HERE)


class Planner:
    """The model of one neural network's splits.

    Args:
        profile: measured at one batch size; others are in proportion.
        link: between two stages of this machine, or None.
        frozen: so many layers from the first on are not trained.
    """

    def __init__(self, profile: Profile, link: Link | None, frozen: int):
        self.profile, self.frozen = profile, frozen
        self.links = LINKS if link is None else {HERE: link} | LINKS
        self.at_batch = lru_cache(maxsize=None)(self._at_batch)

    def predicted(self, choice: Choice) -> SplitModel:
        profile = self.at_batch(choice.batch_size)
        return predict_split(profile, choice.points, **self._settings(choice))

    def best(self, choice: Choice, objective: str, cap_bytes: float) -> SplitModel:
        """The best split into as many stages; ``math.inf`` is no cap."""
        return best_split(
            self.at_batch(choice.batch_size),
            len(choice.points) + 1,
            **self._settings(choice),
            objective=objective,
            memory_cap_bytes=None if cap_bytes == math.inf else cap_bytes,
        )

    def draw(self, choice: Choice, measured: MeasuredSplit | None) -> plots.CaptionedFigure:
        drawn = plots.split_costs(
            self.at_batch(choice.batch_size),
            self.predicted(choice),
            measured,
            title=self.title(choice),
            reach=self._reach(choice),
        )
        caption = drawn.caption
        if measured and choice.link != HERE:
            caption += f" It was measured on {HERE}, not over {choice.link}."
        return plots.CaptionedFigure(drawn.figure, alt=drawn.alt, caption=caption)

    def words(self, choice: Choice, measured: MeasuredSplit | None) -> str:
        """The figure's title and caption."""
        words = split_words(self.predicted(choice), measured)
        return f"{self.title(choice)}, {cuts(choice.points)}. {words}"

    def title(self, choice: Choice) -> str:
        text = f"{self.profile.model} in {len(choice.points) + 1} stages over {choice.link}, "
        text += f"batch of {choice.batch_size}"
        if choice.micro_batches > 1:
            text += f" in {choice.micro_batches} ({choice.schedule})"
        measured = self.profile.batch_size
        return text if choice.batch_size == measured else f"{text}, scaled from {measured}"

    def whole_bytes(self, batch_size: int) -> int:
        """The memory of all layers on one stage."""
        profile = self.at_batch(batch_size)
        return predict_split(profile, (), Link(0, 0), frozen=self.frozen).memory_bytes[0]

    def _settings(self, choice: Choice) -> dict[str, Any]:
        return {
            "link": self.links[choice.link],
            "micro_batches": choice.micro_batches,
            "schedule": choice.schedule,
            "frozen": self.frozen,
        }

    def _at_batch(self, batch_size: int) -> Profile:
        """The profile, in proportion; parameters are as many for any batch."""
        ratio = batch_size / self.profile.batch_size
        layers = tuple(
            replace(
                layer,
                forward_s=layer.forward_s * ratio,
                backward_s=layer.backward_s * ratio,
                output_bytes=round(layer.output_bytes * ratio),
                held_bytes=round(layer.held_bytes * ratio),
            )
            for layer in self.profile.layers
        )
        input_bytes = round(self.profile.input_bytes * ratio)
        return Profile(self.profile.model, batch_size, input_bytes, layers)

    def _reach(self, choice: Choice) -> Reach:
        """The longest step and hop, and the largest stage, that any such cuts could make."""
        profile, link = self.at_batch(choice.batch_size), self.links[choice.link]
        largest = max(layer.output_bytes for layer in profile.layers[:-1])
        messages = choice.micro_batches
        hop_s = 2 * messages * link.message_seconds(largest / messages)
        compute_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
        step_s = compute_s + len(choice.points) * hop_s
        return Reach(step_s, hop_s, self.whole_bytes(choice.batch_size))


def cuts(points: Sequence[int]) -> str:
    return f"cut before layer{'s' * (len(points) > 1)} {', '.join(map(str, points))}"
