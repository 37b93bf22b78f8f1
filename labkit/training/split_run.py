"""A split model on real processes, measured stage by stage and hop by hop.

What ``placement.predict_split`` predicts is run on random samples, with a barrier before every
step. Times of hops are those of the transfers alone, without waiting for the other stage.

Symbols: P stages and ranks, M micro-batches.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from labkit.comm.comm import Comm
from labkit.comm.peak_memory import PeakMemory
from labkit.devices import num_cores
from labkit.placement.planner import Profile
from labkit.placement.profile import profile_layers
from labkit.runtime.launch import run
from labkit.schedules.split_points import as_split_points, check_split_points
from labkit.strategies.model_parallel import ModelParallel
from labkit.strategies.pipeline import Pipeline
from labkit.strategies.stage import StagedModel
from labkit.tracing import Span, Trace
from labkit.tracing.limits import Limit, what_limited
from labkit.units import check_choice, check_integer
from labkit.workload.layers import input_dtype, layer_outputs, layers_of
from labkit.workload.models import MODELS, build_model

NUM_CLASSES = 10
_LEARNING_RATE = 1e-3
_TIMEOUT_S = 600
_WARM_UP = 1
# The kind of a span of almost no length, which marks where a step begins.
_MARK = "data"


@dataclass(frozen=True)
class MeasuredSplit:
    """The time and memory that the steps of a split model took.

    Attributes:
        forward_s, backward_s: by stage, seconds per batch, the median over the steps.
        forward_hop_s, backward_hop_s: by cut and step, seconds of all transfers over the cut in
            that direction; empty where nothing crosses.
        hop_bytes: by cut, bytes of one step in one direction.
        step_s: by step, seconds from the first rank's start to the last one's end.
        memory_bytes: by stage, of parameters, buffers, gradients, momentum and ``held_bytes``.
        held_bytes: by stage, the most bytes of activations held at one time.
        trace: of the counted steps.
        peak_memory: by stage, also of what torch and the messages need.
    """

    split_points: tuple[int, ...]
    batch_size: int
    micro_batches: int
    schedule: str
    forward_s: list[float]
    backward_s: list[float]
    forward_hop_s: list[list[float]]
    backward_hop_s: list[list[float]]
    hop_bytes: list[int]
    step_s: list[float]
    memory_bytes: list[int]
    held_bytes: list[int]
    trace: Trace = field(repr=False)
    peak_memory: list[PeakMemory | None] = field(repr=False, default_factory=list)

    def explain(self) -> Limit:
        """What limited the steps: a stage, the bubble, or the hops."""
        return what_limited(self.trace)

    def typical_step(self) -> Trace:
        """The spans of the counted step whose length is the median."""
        steps = _by_step(self.trace)
        place = self.step_s.index(statistics.median_low(self.step_s))
        spans = [span for span in steps[place].spans if span.kind != _MARK]
        return Trace.merge([spans], self.trace.devices)


def measure_split(
    model: str | nn.Module = "vgg16",
    split_points: Sequence[int] = (31,),
    *,
    batch_size: int = 16,
    input_shape: tuple[int, ...] = (3, 32, 32),
    micro_batches: int = 1,
    schedule: str = "gpipe",
    frozen: int = 0,
    steps: int = 7,
    transport: str = "auto",
    device: str = "auto",
    devices: str | Sequence[str] | None = None,
) -> MeasuredSplit:
    """Train ``model`` for some steps, one process per stage, and measure time and memory.

    Args:
        model: one of ``labkit``'s, or a chain of layers that ends with logits [n, classes, ...].
        split_points: layers that begin a stage; P - 1 of them for P ranks.
        batch_size: random samples per step.
        input_shape: of one sample.
        micro_batches: M, at most one per sample; 1 is model parallelism without a pipeline.
        schedule: ``gpipe`` or ``1f1b``.
        frozen: how many of the first layers are not trained.
        steps: how many are measured, after one that warms up.
        transport, device, devices: see ``labkit.run``.

    Raises:
        ValueError: unknown names, impossible split points, or nothing to measure.
    """
    points, build = as_split_points(split_points), partial(_build, model, input_shape, frozen)
    check_integer("steps", steps)
    check_integer("batch_size", batch_size)
    built = build()
    check_split_points(points, len(layers_of(built)))
    strategy: StagedModel = Pipeline(points, micro_batches, schedule)
    if micro_batches == 1:
        strategy = ModelParallel(points)
    # As in ``even_split``, real samples: the meta device takes seconds.
    sample = torch.zeros((1, *input_shape), dtype=input_dtype(built))
    *_, logits = layer_outputs(built, sample)
    settings: dict[str, Any] = {"transport": transport, "device": device, "devices": devices}
    work = strategy, build, (batch_size, *input_shape), (batch_size, *logits.shape[1:]), steps
    result = run(_train, *work, world_size=len(points) + 1, timeout_s=_TIMEOUT_S, **settings)
    held, parameters, peaks = zip(*result.values)
    traces = _by_step(result.trace)[_WARM_UP:]
    stages, cuts = range(len(held)), range(len(points))
    return MeasuredSplit(
        *(points, batch_size, min(micro_batches, batch_size), schedule),
        forward_s=[_median(traces, stage, "forward") for stage in stages],
        backward_s=[_median(traces, stage, "backward") for stage in stages],
        forward_hop_s=[_seconds_of_hops(traces, cut, cut + 1) for cut in cuts],
        backward_hop_s=[_seconds_of_hops(traces, cut + 1, cut) for cut in cuts],
        hop_bytes=[sum(s.num_bytes for s in _hops(traces[0], cut, cut + 1)) for cut in cuts],
        step_s=[max(s.end_s for s in t.spans) - t.spans[0].start_s for t in traces],
        memory_bytes=[one + other for one, other in zip(held, parameters)],
        held_bytes=list(held),
        trace=Trace.merge((trace.spans for trace in traces), result.trace.devices),
        peak_memory=list(peaks),
    )


def _build(model: str | nn.Module, input_shape: tuple[int, ...], frozen: int = 0) -> nn.Module:
    if isinstance(model, nn.Module):
        built = copy.deepcopy(model)
    else:
        check_choice("model", model, MODELS)
        image = cast("tuple[int, int, int]", input_shape)
        built = build_model(model, num_classes=NUM_CLASSES, input_shape=image, seed=0)
    for layer in layers_of(built)[:frozen]:
        layer.requires_grad_(False)
    return built


def measure_profile(
    model: str | nn.Module = "vgg16",
    *,
    batch_size: int = 16,
    input_shape: tuple[int, ...] = (3, 32, 32),
    num_stages: int = 2,
    repeats: int = 5,
    device: str = "auto",
    devices: str | Sequence[str] | None = None,
) -> Profile:
    """``profile_layers`` in a process with the cores that one of ``num_stages`` stages has."""

    def profiled(comm: Comm) -> Profile:
        torch.set_num_threads(max(1, num_cores() // num_stages))
        name = model if isinstance(model, str) else type(model).__name__
        options = {"repeats": repeats, "device": comm.device, "name": name}
        return profile_layers(_build(model, input_shape), batch_size, input_shape, **options)

    settings: dict[str, Any] = {"device": device, "devices": devices, "timeout_s": _TIMEOUT_S}
    return run(profiled, world_size=1, **settings).values[0]


def _train(
    comm: Comm,
    strategy: StagedModel,
    build: Callable,
    shape: tuple[int, ...],
    logits_shape: tuple[int, ...],
    steps: int,
) -> tuple[int, int, PeakMemory | None]:
    """Take the steps on this rank; return bytes of activations, of all else, and the peak."""
    memory = comm.session.memory_of_part()
    model = build()
    dtype = input_dtype(model)
    strategy.setup(comm, model, partial(torch.optim.SGD, lr=_LEARNING_RATE, momentum=0.9))
    torch.manual_seed(0)
    # Integer samples are zeros: every nn.Embedding has a row 0.
    make = torch.randn if dtype.is_floating_point else torch.zeros
    inputs = make(shape, dtype=dtype, device=comm.device)
    batch_size, classes, *places = logits_shape
    targets = torch.randint(classes, (batch_size, *places), device=comm.device)
    # The layers of the other stages are freed: they are no part of this stage's memory.
    del model

    def step() -> None:
        comm.barrier()
        with comm.span(_MARK):
            pass
        strategy.step(inputs, targets, len(targets))

    for _ in range(_WARM_UP):
        step()
    with memory.counted():
        for _ in range(steps):
            step()
    stage = strategy.module
    trained = sum(p.nbytes for p in stage.parameters() if p.requires_grad)
    kept = sum(t.nbytes for t in (*stage.parameters(), *stage.buffers()))
    return strategy.held_bytes, kept + 2 * trained, memory.peak


def _by_step(trace: Trace) -> list[Trace]:
    """Cut the trace at the marks: one trace per step, from its mark to the update that ends it."""
    steps: list[list[Span]] = []
    for rank in trace.ranks:
        number = -1
        for span in trace.of(rank):
            if span.kind == _MARK:
                number += 1
                steps += [[] for _ in range(number + 1 - len(steps))]
            # Ranks meet before the first mark and between two steps; no step contains this time.
            is_meeting = span.kind == "wait" and span.peer is None
            if number >= 0 and not is_meeting:
                steps[number].append(span)
    return [Trace.merge([spans]) for spans in steps]


def _median(traces: list[Trace], rank: int, kind: str) -> float:
    return statistics.median(trace.seconds_by_kind(rank).get(kind, 0.0) for trace in traces)


def _hops(trace: Trace, source: int, destination: int) -> list[Span]:
    sent = trace.of(source, "communicate")
    return [span for span in sent if span.peer == destination and span.num_bytes]


def _seconds_of_hops(traces: list[Trace], source: int, destination: int) -> list[float]:
    """By step, the seconds of all transfers from one stage to another; empty if there are none."""
    seconds = [[span.duration_s for span in _hops(t, source, destination)] for t in traces]
    return [sum(one) for one in seconds if one]
