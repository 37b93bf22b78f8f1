"""Measured times of links and split models on this machine: P ranks or stages, M micro-batches.

``measure_link`` fits what ``costs.link`` predicts with; ``measure_split`` runs what
``costs.predict_split`` predicts, on random samples.
"""

import copy
import operator
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.costs.layer_profile import profile_layers
from labkit.costs.link import Link, fit_link
from labkit.costs.planner import Profile
from labkit.engine.comm.comm import Comm
from labkit.engine.devices import num_cores
from labkit.engine.gpus import synchronize
from labkit.engine.runtime.launch import run
from labkit.engine.tracing import Span, Trace
from labkit.engine.tracing.limits import Limit, what_limited
from labkit.engine.tracing.spans import STEP_KINDS
from labkit.schedules.split_points import check_split_points
from labkit.strategies.model_parallel import ModelParallel, Pipeline
from labkit.strategies.staged_model import StagedModel
from labkit.units import check_choice, format_bytes
from labkit.workload.layers import layers_of, output_shapes
from labkit.workload.models import build_model

PATTERNS = ("ping_pong", "exchange")
MESSAGE_BYTES = tuple(2**power for power in (10, 12, 14, 16, 18, 20, 22, 24))
ADDED_BYTES = 4 * 2**20
_IMAGE = (3, 32, 32)
_TIMEOUT_S = 600
# The kind of a span of almost no length, which marks where a step begins.
_MARK = "data"
_BACKWARDS = STEP_KINDS - {"compute", "forward"}


@dataclass(frozen=True, kw_only=True)
class MeasuredLink(Link):
    """A link that was measured; it prints as a line that ends with the ``method``.

    ``seconds`` is {size in bytes: [seconds of a message, by repeat]}.
    """

    method: str
    seconds: dict[int, list[float]] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.method})"


def measure_link(
    world_size: int = 2,
    pattern: str = "ping_pong",
    *,
    sizes_bytes: tuple[int, ...] = MESSAGE_BYTES,
    repeats: int = 11,
    gamma: bool = False,
    **options: Any,
) -> MeasuredLink:
    """Measure what a message between ranks of this machine costs: alpha + beta x bytes.

    In each repeat every size has its turn, so that a disturbance of some milliseconds spoils one
    repeat of each size, not all repeats of one. The line is fitted to the medians.

    Args:
        world_size: P. All ranks send at the same time: with more ranks than cores a message
            takes longer, and the figures hold for this P only.
        pattern: ``ping_pong`` sends a message from one rank to another and back, and takes half
            of the time; it needs P = 2. ``exchange`` is a step of a ring: each rank sends to the
            right while it receives from the left; its time is that of the slowest rank.
        sizes_bytes: the sizes of the messages, at least two; each has ``repeats`` counted turns.
        gamma: also measure gamma, the seconds to add a byte, on all ranks at once.
        options: ``device``, ``devices`` and ``transport``, see ``labkit.run``.
    """
    check_choice("pattern", pattern, PATTERNS)
    if world_size != 2 and pattern == "ping_pong":
        raise ValueError(f"a ping-pong has 2 ranks, not {world_size}: take pattern='exchange'")
    settings = pattern, tuple(sizes_bytes), repeats, gamma
    by_rank = run(_time_messages, *settings, world_size=world_size, **options).values
    moved_by, seconds, added_s = by_rank[0]
    for _, rank_seconds, rank_added_s in by_rank[1:]:
        # All take as long as on the slowest rank.
        added_s = list(map(max, added_s, rank_added_s))
        # (Of a ping-pong only rank 0 sees whole rounds, from its send to the answer.)
        if pattern == "exchange":
            for size in sizes_bytes:
                seconds[size] = list(map(max, seconds[size], rank_seconds[size]))
    sizes = []
    times_s = []
    for size in sizes_bytes:
        sizes += [size] * len(seconds[size])
        times_s += seconds[size]
    gamma_s = 0.0
    if gamma:
        gamma_s = statistics.median(added_s) / ADDED_BYTES
    method = f"{pattern.replace('_', '-')}, {world_size} ranks, {moved_by}, "
    method += f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}, medians of {repeats}"
    return MeasuredLink(
        **asdict(fit_link(sizes, times_s, gamma_s)), method=method, seconds=seconds
    )


def _time_messages(
    comm: Comm, pattern: str, sizes_bytes: tuple[int, ...], repeats: int, gamma: bool
) -> tuple[str, dict[int, list[float]], list[float]]:
    """Return by what messages moved, this rank's seconds of one by size, and of additions."""
    right = (comm.rank + 1) % comm.world_size
    left = (comm.rank - 1) % comm.world_size

    def move(size: int) -> None:
        if pattern == "exchange":
            comm.exchange(outgoing[size], right, incoming[size], left)
        elif comm.rank == 0:
            comm.send(outgoing[size], 1)
            comm.recv(incoming[size], 1)
        else:
            comm.recv(incoming[size], 0)
            comm.send(outgoing[size], 0)

    def timed(times: int, action: Callable[[], object]) -> float:
        """This rank's seconds per ``action``, several in a row after a barrier."""
        comm.barrier()
        # On NCCL a barrier is queued like any other message, and its call may return before it.
        synchronize(comm.device)
        start_s = time.perf_counter()
        for _ in range(times):
            action()
        synchronize(comm.device)
        return (time.perf_counter() - start_s) / times

    outgoing = {n: torch.ones(n, dtype=torch.uint8, device=comm.device) for n in sizes_bytes}
    incoming = {size: torch.zeros_like(tensor) for size, tensor in outgoing.items()}
    total = torch.zeros(ADDED_BYTES // 4, device=comm.device)
    add = partial(total.add_, torch.ones_like(total))
    seconds: dict[int, list[float]] = {size: [] for size in sizes_bytes}
    added_s = []
    for _ in range(repeats + 1):
        for size, times in seconds.items():
            # Small messages several in a row, as clocks and barriers have a price, too.
            in_a_row = max(1, min(16, 2**22 // size))
            took_s = timed(in_a_row, partial(move, size))
            if pattern == "ping_pong":
                took_s /= 2
            times.append(took_s)
        if gamma:
            added_s.append(timed(1, add))
    moved_by = dist.get_backend().replace("nccl", "NCCL")
    if comm.transport.shares_memory:
        moved_by = "shared memory"
    # The first round warms up.
    return moved_by, {size: times[1:] for size, times in seconds.items()}, added_s[1:]


@dataclass(frozen=True)
class MeasuredSplit:
    """The time and memory that the steps of a split model took.

    With several stages on a rank, the lists by stage are by rank, and those by cut by two ranks.

    Attributes:
        forward_s, backward_s: by stage, seconds per batch, the median over the steps.
        forward_hop_s, backward_hop_s: by cut and step, seconds of all transfers over the cut in
            that direction, without waiting for the other stage; empty where nothing crosses.
        hop_bytes: by cut, bytes of one step in one direction.
        step_s: by step, seconds from the first rank's start to the last one's end.
        memory_bytes: by stage, of parameters, buffers, gradients, momentum and ``held_bytes``.
        held_bytes: by stage, the most bytes of activations held at one time.
        trace: of the counted steps.
    """

    split_points: tuple[int, ...]
    batch_size: int
    micro_batches: int
    schedule: str
    memory_bytes: list[int]
    held_bytes: list[int]
    trace: Trace = field(repr=False)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    forward_hop_s: list[list[float]] = field(default_factory=list)
    backward_hop_s: list[list[float]] = field(default_factory=list)
    hop_bytes: list[int] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def explain(self) -> Limit:
        """Explain what limited the steps: a stage, the bubble, or the hops."""
        return what_limited(self.trace)

    def typical_step(self) -> Trace:
        """The spans of the counted step whose length is the median."""
        index = self.step_s.index(statistics.median_low(self.step_s))
        spans = [span for span in _by_step(self.trace)[index].spans if span.kind != _MARK]
        return Trace.merge([spans], self.trace.devices, self.trace.about)


def measure_split(
    model: str | nn.Module = "vgg16",
    split_points: Sequence[int] = (31,),
    *,
    batch_size: int = 16,
    input_shape: tuple[int, ...] = _IMAGE,
    micro_batches: int = 1,
    schedule: str = "gpipe",
    stages_per_rank: int | None = None,
    recompute: bool = False,
    steps: int = 7,
    **options: Any,
) -> MeasuredSplit:
    """Train ``model`` for some steps, one process per stage, and measure time and memory.

    Args:
        model: one of ``labkit``'s, or a chain of layers that ends with logits [n, classes].
        split_points: layers that begin a stage; P V - 1 of them for P ranks.
        batch_size, input_shape: random samples per step, and the shape of one.
        micro_batches: M, at most one per sample; 1 is model parallelism without a pipeline.
        schedule, stages_per_rank, recompute: see ``Pipeline``.
        steps: the number of measured steps, after one that warms up.
        options: ``device``, ``devices`` and ``transport``, see ``labkit.run``.
    """
    strategy: StagedModel = Pipeline(
        split_points, micro_batches, schedule, stages_per_rank, recompute=recompute
    )
    built = model if isinstance(model, nn.Module) else _build(model, input_shape)
    chunks = strategy.stages_per_rank
    num_ranks = (len(split_points) + 1) // chunks
    points = check_split_points(split_points, len(layers_of(built)), num_ranks * chunks)
    if micro_batches == chunks == 1:
        strategy = ModelParallel(points, recompute=recompute)
    work = strategy, partial(_build, model, input_shape), (batch_size, *input_shape), steps
    result = run(_train, *work, world_size=num_ranks, timeout_s=_TIMEOUT_S, **options)
    held, parameters = zip(*result.values)
    # The first step warms up.
    traces = _by_step(result.trace)[1:]
    counted = [trace.spans for trace in traces]
    split = MeasuredSplit(
        split_points=points,
        batch_size=batch_size,
        micro_batches=min(micro_batches, batch_size),
        schedule=schedule,
        memory_bytes=list(map(operator.add, held, parameters)),
        held_bytes=list(held),
        trace=Trace.merge(counted, result.trace.devices, result.trace.about),
    )
    for spans in counted:
        split.step_s.append(max(span.end_s for span in spans) - spans[0].start_s)
    for stage in range(num_ranks):
        split.forward_s.append(_median(traces, stage, "forward"))
        split.backward_s.append(_median(traces, stage, *_BACKWARDS))
    for cut in range(num_ranks - 1):
        split.forward_hop_s.append(_hop_s(traces, cut, cut + 1))
        split.backward_hop_s.append(_hop_s(traces, cut + 1, cut))
        split.hop_bytes.append(sum(span.num_bytes for span in _hops(traces[0], cut, cut + 1)))
    return split


def _build(model: str | nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    return build_model(model, num_classes=10, input_shape=input_shape, seed=0)  # type: ignore


def measure_profile(
    model: str | nn.Module = "vgg16",
    *,
    batch_size: int = 16,
    num_stages: int = 2,
    repeats: int = 5,
    **options: Any,
) -> Profile:
    """``profile_layers`` in a process with the cores that one of ``num_stages`` stages has."""

    def profiled(comm: Comm) -> Profile:
        torch.set_num_threads(max(1, num_cores() // num_stages))
        name = model if isinstance(model, str) else type(model).__name__
        options = {"repeats": repeats, "device": comm.device, "name": name}
        return profile_layers(_build(model, _IMAGE), batch_size, _IMAGE, **options)

    return run(profiled, world_size=1, timeout_s=_TIMEOUT_S, **options).values[0]


def _train(
    comm: Comm, strategy: StagedModel, build: Callable, shape: tuple[int, ...], steps: int
) -> tuple[int, int]:
    """Take the steps on this rank; return bytes of activations, and of all else."""
    model = build()
    (_, classes), _ = output_shapes(model, shape[1:])[-1]
    strategy.setup(comm, model, partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
    torch.manual_seed(0)
    inputs = torch.randn(shape, device=comm.device)
    targets = torch.randint(classes, shape[:1], device=comm.device)
    # The layers of the other stages are freed: they are no part of this stage's memory.
    del model

    for _ in range(steps + 1):
        comm.barrier()
        with comm.span(_MARK):
            pass
        strategy.step(inputs, targets, len(targets))
    stage = strategy.module
    trained = sum(p.nbytes for p in stage.parameters() if p.requires_grad)
    kept = sum(t.nbytes for t in (*stage.parameters(), *stage.buffers()))
    return strategy.meter.peak_bytes, kept + 2 * trained


def _by_step(trace: Trace) -> list[Trace]:
    """Cut the trace at the marks: one trace per step, from its mark to the update that ends it."""
    steps: dict[int, list[Span]] = defaultdict(list)
    numbers = Counter[int]()
    for span in trace.spans:
        numbers[span.rank] += span.kind == _MARK
        # Ranks meet before the first mark and between two steps; no step contains this time.
        is_barrier = span.kind == "wait" and span.peer is None
        if numbers[span.rank] and not is_barrier:
            steps[numbers[span.rank]].append(span)
    return [Trace.merge([steps[number]]) for number in sorted(steps)]


def _median(traces: list[Trace], rank: int, *kinds: str) -> float:
    totals_s = []
    for trace in traces:
        seconds = trace.seconds_by_kind(rank)
        totals_s.append(sum(seconds.get(kind, 0.0) for kind in kinds))
    return statistics.median(totals_s)


def _hops(trace: Trace, source: int, destination: int) -> list[Span]:
    sent = trace.of(source, "communicate")
    return [span for span in sent if span.peer == destination and span.num_bytes]


def _hop_s(traces: list[Trace], source: int, destination: int) -> list[float]:
    """Seconds by step of all transfers from one stage to another; empty if there are none."""
    seconds = []
    for trace in traces:
        hops = _hops(trace, source, destination)
        if hops:
            seconds.append(sum(span.duration_s for span in hops))
    return seconds
