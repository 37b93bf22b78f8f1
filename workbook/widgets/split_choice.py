"""What the split explorer offers, the model's prediction for each choice, and both as data."""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from matplotlib.ticker import MaxNLocator

from labkit.costs.link import Link
from labkit.placement.planner import Profile, SplitModel, predict_split
from labkit.schedules.pipeline import PIPELINES
from labkit.schedules.split_points import stage_bounds
from labkit.tracing import Span
from labkit.training.measured import MeasuredSplit
from labkit.units import format_bytes, format_number, format_seconds, second_unit
from workbook.plots.models import LINKS as NETWORKS

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
# (kind, start, end) of a bar, in seconds of the step.
Bar = tuple[str, float, float]


class Choice(NamedTuple):
    """A split, and the settings of its step."""

    points: tuple[int, ...]
    link: str
    micro_batches: int
    schedule: str
    batch_size: int


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

    def settings(self, choice: Choice) -> dict[str, Any]:
        """The keywords that ``predict_split`` and ``best_split`` take."""
        return {
            "link": self.links[choice.link],
            "micro_batches": choice.micro_batches,
            "schedule": choice.schedule,
            "frozen": self.frozen,
        }

    def predicted(self, choice: Choice) -> SplitModel:
        return predict_split(
            self.profile(choice.batch_size), choice.points, **self.settings(choice)
        )

    def whole_bytes(self, batch_size: int) -> int:
        """The memory of all layers on one stage."""
        whole = predict_split(self.profile(batch_size), (), Link(0, 0), frozen=self.frozen)
        return whole.memory_bytes[0]

    def profile(self, batch_size: int) -> Profile:
        """The profile at this batch size; the parameters do not depend on it."""
        ratio = batch_size / self.measured.batch_size
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
        return Profile(self.measured.model, batch_size, input_bytes, layers)

    def title(self, choice: Choice) -> str:
        text = f"{self.measured.model} in {len(choice.points) + 1} stages over {choice.link}, "
        text += f"batch of {choice.batch_size}"
        if choice.micro_batches > 1:
            text += f" in {choice.micro_batches} ({choice.schedule})"
        size = self.measured.batch_size
        return text if choice.batch_size == size else f"{text}, scaled from {size}"

    def offered(self, size: int) -> dict[str, list]:
        """What each control offers, from a batch of ``size``: values, or (label, value)."""
        batches = sorted({size // 4, size // 2, size, 2 * size, 4 * size} - {0})
        bits = self.whole_bytes(batches[-1]).bit_length()
        caps = [(format_bytes(2**power), 2**power) for power in range(max(0, bits - 6), bits)]
        return {
            "stages": list(range(2, min(MAX_STAGES, len(self.measured.layers)) + 1)),
            "link": list(self.links),
            "batch_size": batches,
            "micro_batches": [count for count in MICRO_BATCHES if count <= batches[-1]],
            "schedule": list(PIPELINES),
            "objective": [*OBJECTIVES],
            "cap_bytes": [*caps, ("no limit", None)],
        }


def layer_data(profile: Profile, frozen: int) -> list[dict[str, Any]]:
    """The layers for the browser."""
    return [
        {
            "name": layer.name,
            "seconds": layer.forward_s + layer.backward_s * (index >= frozen),
            "bytes": layer.output_bytes,
            "sends": format_bytes(layer.output_bytes),
            "words": f"layer {index}, {layer.name}: forward {format_seconds(layer.forward_s)}, "
            f"backward {format_seconds(layer.backward_s)}, output "
            f"{format_bytes(layer.output_bytes)}, parameters "
            f"{format_bytes(layer.parameter_bytes)}",
        }
        for index, layer in enumerate(profile.layers)
    ]


def step_data(
    split: SplitModel, num_layers: int, run: MeasuredSplit | None, whole: int, cap: float | None
) -> dict[str, Any]:
    """A predicted step and a measured one as the browser draws them: words, and bars in seconds.

    Args:
        split: the prediction, for a model of ``num_layers``.
        run: a measurement of the same split.
        whole: bytes that the longest bar of memory stands for, or more if a stage or the cap is.
        cap: bytes that a stage may hold.
    """
    ends = [("model", split.step_s, f"model {format_seconds(split.step_s)}")]
    measured: list[Bar] = []
    spans: list[tuple[int, Bar]] = []
    if run is not None:
        step_s = statistics.median(run.step_s)
        ends.append(("measured", step_s, f"measured {format_seconds(step_s)}"))
        spans = list(_measured_bars(run))
        measured = [bar for _, bar in spans]
    most = max(whole, cap or 0, *(run.memory_bytes if run else ())) or 1

    def memory(size: int) -> tuple[float, str, bool]:
        is_over = cap is not None and size > cap
        return size / most, f"{format_bytes(size)}{' !' if is_over else ''}", is_over

    stages = []
    for stage, (first, end) in enumerate(stage_bounds(split.split_points, num_layers)):
        slots = [slot for slot in split.slots() if slot.stage == stage]
        row: dict[str, Any] = {"range": f"{first}–{end - 1}" if end > first + 1 else str(first)}
        bars = [(slot.kind, slot.start_s, slot.end_s) for slot in slots]
        row["model"] = {"spans": bars, "memory": memory(split.memory_bytes[stage])}
        if run is not None:
            bars = [bar for rank, bar in spans if rank == stage]
            row["measured"] = {"spans": bars, "memory": memory(run.memory_bytes[stage])}
        stages.append(row)
    return {
        "numbers": step_numbers(split, run),
        "stages": stages,
        "hops": list(_hops(split)),
        "ends": ends,
        "last_s": max([1e-9, *(s for _, s, _ in ends), *(end for *_, end in measured)]),
        "cap": None if cap is None else cap / most,
    }


def ticks(end_s: float) -> list[tuple[float, str]]:
    """The ticks of an axis from 0 to ``end_s``: seconds, and words."""
    scale, unit = second_unit(end_s)
    places = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(0, end_s / scale)
    return [
        (place * scale, format_number(place) if place else f"0 {unit}")
        for place in places
        if 0 <= place <= end_s / scale
    ]


def step_numbers(
    split: SplitModel, run: MeasuredSplit | None = None
) -> list[tuple[str, str, str]]:
    """What stands above the picture: name, the model's number, and the measured one."""
    largest_s = max(f + b for f, b in zip(split.forward_s, split.backward_s))
    hops_s = sum(split.hop_s) + sum(split.backward_hop_s)
    sent = [size * (1 + bool(back)) for size, back in zip(split.hop_bytes, split.backward_hop_s)]
    real = [""] * 5
    if run is not None:
        compute_s = [f + b for f, b in zip(run.forward_s, run.backward_s)]
        step_s = statistics.median(run.step_s)
        idle = 1 - sum(compute_s) / (len(compute_s) * step_s)
        hops = [*run.forward_hop_s, *run.backward_hop_s]
        measured_s = sum(statistics.median(hop) for hop in hops if hop)
        real = [format_seconds(step_s), f"{idle:.0%}", format_seconds(max(compute_s))]
        real += [format_seconds(measured_s), format_bytes(max(run.memory_bytes))]
    return [
        ("step", format_seconds(split.step_s), real[0]),
        ("bubble: stages idle", f"{split.bubble:.0%}", real[1]),
        ("largest stage", format_seconds(largest_s), real[2]),
        ("all hops", format_seconds(hops_s), real[3]),
        ("largest memory", format_bytes(max(split.memory_bytes)), real[4]),
        ("bytes of a step", format_bytes(sum(sent)), ""),
    ]


def _hops(split: SplitModel) -> Iterator[dict[str, Any]]:
    """Over each cut: its name, its words, and when which message is on its way."""
    for cut, point in enumerate(split.split_points):
        there_s, back_s = split.hop_s[cut], split.backward_hop_s[cut]
        message_s = there_s / split.micro_batches
        spans: list[Bar] = []
        for slot in split.slots():
            if slot.kind == "forward" and slot.stage == cut:
                spans.append(("activation", slot.end_s, slot.end_s + message_s))
            elif slot.kind == "backward" and slot.stage == cut + 1 and back_s:
                spans.append(("gradient", slot.end_s, slot.end_s + message_s))
        ways = " ⇄" if back_s else ","
        words = f"{format_bytes(split.hop_bytes[cut])}{ways} {format_seconds(there_s + back_s)}"
        yield {"name": f"cut {point}", "words": words, "spans": spans}


def _measured_bars(run: MeasuredSplit) -> Iterator[tuple[int, Bar]]:
    """(stage, bar) of a typical step, without waiting."""
    spans = run.typical_step().spans
    for span in spans:
        kind = _kind_of(span)
        if kind in ("forward", "backward", "activation", "gradient", "update"):
            origin_s = spans[0].start_s
            yield span.rank, (kind, span.start_s - origin_s, span.end_s - origin_s)


def _kind_of(span: Span) -> str:
    if span.kind != "communicate" or span.peer is None:
        return span.kind
    # What a stage sends to the next one, or gets from the one before, is an activation.
    is_forward = (span.peer > span.rank) == bool(span.num_bytes)
    return "activation" if is_forward else "gradient"
