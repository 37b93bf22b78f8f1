"""The step of a split, predicted and measured, as the browser draws it: words, and bars."""

from collections.abc import Iterator
from operator import mul
from statistics import median
from typing import Any

from matplotlib.ticker import MaxNLocator

from labkit.placement.planner import Profile, SplitModel
from labkit.schedules.split_points import stage_bounds
from labkit.training.measured import MeasuredSplit
from labkit.units import format_bytes, format_number, format_seconds, second_unit

# (kind, start, end) of a bar, in seconds of the step.
Bar = tuple[str, float, float]


def layer_data(profile: Profile) -> list[dict[str, Any]]:
    """The layers of the row: widths in seconds, heights in bytes."""
    return [
        {
            "name": layer.name,
            "seconds": layer.forward_s + layer.backward_s,
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
    split: SplitModel, num_layers: int, whole_bytes: int, run: MeasuredSplit | None
) -> dict[str, Any]:
    """A step in lanes; memory's longest bar stands for ``whole_bytes``, or more if a stage is."""
    steps = {"model": split.step_s} | ({"measured": median(run.step_s)} if run else {})
    ends = [(look, s, f"{look} {format_seconds(s)}") for look, s in steps.items()]
    spans = list(_measured_bars(run)) if run else []
    most = max(whole_bytes, *(run.memory_bytes if run else ()), 1)
    stages = []
    for stage, (first, end) in enumerate(stage_bounds(split.split_points, num_layers)):
        bars = [(s.kind, s.start_s, s.end_s) for s in split.slots() if s.stage == stage]
        rows = [("model", bars, split.memory_bytes[stage])]
        if run is not None:
            bars = [bar for rank, bar in spans if rank == stage]
            rows.append(("measured", bars, run.memory_bytes[stage]))
        looks = {
            look: {"spans": bars, "memory": (size / most, format_bytes(size))}
            for look, bars, size in rows
        }
        stages.append({"range": f"{first}–{end - 1}", **looks})
    return {
        "stages": stages,
        "hops": list(_hops(split)),
        "ends": ends,
        "last_s": max([1e-9, *(s for _, s, _ in ends), *(end for _, (*_, end) in spans)]),
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


def step_numbers(split: SplitModel, run: MeasuredSplit | None) -> tuple[list[str], list]:
    """The table above the picture: its head, the model's row, and that of the measurement."""
    heads = ["", "step", "idle", "largest stage", "all hops", "largest memory", "bytes of a step"]

    def row(name: str, source: SplitModel | MeasuredSplit, step_s: float, hops_s: float) -> list:
        compute_s = [f + b for f, b in zip(source.forward_s, source.backward_s)]
        idle = f"{1 - sum(compute_s) / (len(compute_s) * step_s):.0%}"
        seconds = format_seconds(step_s), idle, *map(format_seconds, (max(compute_s), hops_s))
        # No gradient goes back to stages that train nothing.
        ways = (1 + (back_s > 0) for back_s in split.backward_hop_s)
        moved = format_bytes(sum(map(mul, source.hop_bytes, ways)))
        return [name, *seconds, format_bytes(max(source.memory_bytes)), moved]

    rows = [row("model", split, split.step_s, sum(split.hop_s) + sum(split.backward_hop_s))]
    if run is not None:
        hops_s = sum(map(median, (*run.forward_hop_s, *run.backward_hop_s)))
        rows.append(row("measured", run, median(run.step_s), hops_s))
    return heads, rows


def _hops(split: SplitModel) -> Iterator[dict[str, Any]]:
    """Over each cut: its name, its words, and when which message is on its way."""
    for cut, point in enumerate(split.split_points):
        message_s = split.hop_s[cut] / split.micro_batches
        sends = {("forward", cut): "activation", ("backward", cut + 1): "gradient"}
        spans = [
            (sends[slot.kind, slot.stage], slot.end_s, slot.end_s + message_s)
            for slot in split.slots()
            if (slot.kind, slot.stage) in sends
        ]
        back_s = split.backward_hop_s[cut]
        both = format_seconds(split.hop_s[cut] + back_s)
        words = f"{format_bytes(split.hop_bytes[cut])} {'⇄' if back_s else '→'} {both}"
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
