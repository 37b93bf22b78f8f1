"""The step of a split, predicted and measured, as the browser draws it: words, and bars."""

from collections.abc import Iterator, Sequence
from operator import add
from statistics import median
from typing import Any

from matplotlib.ticker import MaxNLocator

from labkit.costs.planner import Profile, SplitModel
from labkit.schedules.split_points import stage_bounds
from labkit.training.measured import MeasuredSplit
from labkit.units import format_bytes, format_number, format_seconds, second_unit

# (kind, start, end) of a bar, in seconds of the step.
Bar = tuple[str, float, float]


def cuts_words(split_points: Sequence[int]) -> str:
    """``cut before layers 10, 17``."""
    layers = "layers" if len(split_points) > 1 else "layer"
    return f"cut before {layers} {', '.join(map(str, split_points))}"


def split_caption(predicted: SplitModel, measured: MeasuredSplit | None) -> str:
    """The predicted step of a split, and the measured one."""
    hops_s = sum(predicted.hop_s) + sum(predicted.backward_hop_s)
    stages_s = list(map(add, predicted.forward_s, predicted.backward_s))
    largest_s = max(stages_s)
    text = (
        f"Predicted: the step takes {format_seconds(predicted.step_s)}, with "
        f"{format_seconds(hops_s)} of hops. The largest stage is stage "
        f"{stages_s.index(largest_s)} with {format_seconds(largest_s)}; stages are idle for "
        f"{predicted.bubble:.0%} of the step."
    )
    if measured is None:
        return text
    step_s = median(measured.step_s)
    return (
        f"{text} Measured: {format_seconds(step_s)}, {step_s / predicted.step_s:.2f} times the "
        f"prediction (median of {len(measured.step_s)} steps)."
    )


def layer_data(profile: Profile) -> list[dict[str, Any]]:
    """The layers of the row: widths in seconds, heights in bytes."""
    layers = []
    for index, layer in enumerate(profile.layers):
        sends = format_bytes(layer.output_bytes)
        words = f"layer {index}, {layer.name}: forward {format_seconds(layer.forward_s)}, "
        words += f"backward {format_seconds(layer.backward_s)}, output {sends}, "
        words += f"parameters {format_bytes(layer.parameter_bytes)}"
        layers.append(
            {
                "name": layer.name,
                "seconds": layer.forward_s + layer.backward_s,
                "bytes": layer.output_bytes,
                "sends": sends,
                "words": words,
            }
        )
    return layers


def step_data(
    split: SplitModel, num_layers: int, uncut_bytes: int, run: MeasuredSplit | None
) -> dict[str, Any]:
    """A step in lanes; memory's longest bar stands for ``uncut_bytes``, or more if a stage is."""
    memory_bytes: dict[str, Sequence[int]] = {"predicted": split.memory_bytes}
    bars: dict[str, list[tuple[int, Bar]]] = {"predicted": []}
    for slot in split.slots():
        bars["predicted"].append((slot.rank, (slot.kind, slot.start_s, slot.end_s)))
    ends = [("predicted", split.step_s, f"predicted {format_seconds(split.step_s)}")]
    longest_bytes = max(uncut_bytes, 1)
    last_s = max(1e-9, split.step_s)
    if run is not None:
        memory_bytes["measured"] = run.memory_bytes
        bars["measured"] = list(_measured_bars(run))
        step_s = median(run.step_s)
        ends.append(("measured", step_s, f"measured {format_seconds(step_s)}"))
        longest_bytes = max(longest_bytes, *run.memory_bytes)
        last_s = max(last_s, step_s)
        for _, (_, _, end_s) in bars["measured"]:
            last_s = max(last_s, end_s)
    stages = []
    for stage, (first, end) in enumerate(stage_bounds(split.split_points, num_layers)):
        lanes: dict[str, Any] = {"range": f"{first}–{end - 1}"}
        for look, sizes in memory_bytes.items():
            spans = [bar for bar_stage, bar in bars[look] if bar_stage == stage]
            memory = (sizes[stage] / longest_bytes, format_bytes(sizes[stage]))
            lanes[look] = {"spans": spans, "memory": memory}
        stages.append(lanes)
    return {"stages": stages, "hops": list(_hops(split)), "ends": ends, "last_s": last_s}


def ticks(end_s: float) -> list[tuple[float, str]]:
    """The ticks of an axis from 0 to ``end_s``: seconds, and words."""
    scale, unit = second_unit(end_s)
    marks = []
    for value in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(0, end_s / scale):
        if value == 0:
            marks.append((0.0, f"0 {unit}"))
        elif 0 < value <= end_s / scale:
            marks.append((value * scale, format_number(value)))
    return marks


def step_numbers(split: SplitModel, run: MeasuredSplit | None) -> tuple[list[str], list]:
    """The table above the picture: its head, the predicted row, and that of the measurement."""
    heads = ["", "step", "idle", "largest stage", "all hops", "largest memory", "bytes of a step"]

    def row(name: str, source: SplitModel | MeasuredSplit, step_s: float, hops_s: float) -> list:
        compute_s = list(map(add, source.forward_s, source.backward_s))
        num_bytes = 0
        for hop_bytes, backward_s in zip(source.hop_bytes, split.backward_hop_s):
            num_bytes += hop_bytes
            # No gradient goes back to stages that train nothing.
            if backward_s > 0:
                num_bytes += hop_bytes
        return [
            name,
            format_seconds(step_s),
            f"{1 - sum(compute_s) / (len(compute_s) * step_s):.0%}",
            format_seconds(max(compute_s)),
            format_seconds(hops_s),
            format_bytes(max(source.memory_bytes)),
            format_bytes(num_bytes),
        ]

    rows = [row("predicted", split, split.step_s, sum(split.hop_s) + sum(split.backward_hop_s))]
    if run is not None:
        hops_s = sum(map(median, (*run.forward_hop_s, *run.backward_hop_s)))
        rows.append(row("measured", run, median(run.step_s), hops_s))
    return heads, rows


def _hops(split: SplitModel) -> Iterator[dict[str, Any]]:
    """Each cut's name, its words, and when which message is on its way."""
    for cut, point in enumerate(split.split_points):
        message_s = split.hop_s[cut] / split.micro_batches
        sends = {("forward", cut): "activation", ("backward", cut + 1): "gradient"}
        spans = []
        for slot in split.slots():
            message = sends.get((slot.kind, slot.rank))
            if message:
                spans.append((message, slot.end_s, slot.end_s + message_s))
        backward_s = split.backward_hop_s[cut]
        arrow = "⇄" if backward_s else "→"
        seconds = format_seconds(split.hop_s[cut] + backward_s)
        words = f"{format_bytes(split.hop_bytes[cut])} {arrow} {seconds}"
        yield {"name": f"cut {point}", "words": words, "spans": spans}


def _measured_bars(run: MeasuredSplit) -> Iterator[tuple[int, Bar]]:
    """(stage, bar) of a typical step, without waiting."""
    spans = run.typical_step().spans
    origin_s = min(span.start_s for span in spans)
    for span in spans:
        kind = span.kind
        if kind == "communicate" and span.peer is not None:
            # What a stage sends to the next one, or gets from the one before, is an activation.
            is_forward = (span.peer > span.rank) == bool(span.num_bytes)
            kind = "activation" if is_forward else "gradient"
        if kind in ("forward", "backward", "activation", "gradient", "update"):
            yield span.rank, (kind, span.start_s - origin_s, span.end_s - origin_s)
