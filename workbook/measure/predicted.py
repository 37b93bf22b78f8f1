"""Steps of every technique as a model predicts them, and as they run, on emulated devices.

A small transformer's blocks take time asleep, as on separate devices, and messages go over an
emulated link: so model and run concern the same thing, on two cores, too. What else a step does
(real products, Python, copies) is not in the model, and shows in its error.
"""

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import labkit
from labkit import strategies
from labkit.costs.ddp_step import predict_step
from labkit.costs.link import Link, all_reduce_seconds, parameter_server_seconds
from labkit.costs.pipeline_timeline import predicted_slots
from labkit.costs.traffic import tensor_parallel_cost
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.emulated_link import EmulatedLink
from labkit.engine.devices import num_cores
from labkit.schedules.bucket_assignment import MIB
from labkit.schedules.pipeline import pipeline_streams
from labkit.schedules.ring import chunk_bounds
from labkit.schedules.sharding import sharded_pass
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.training.measured import measure_link
from labkit.units import format_seconds
from labkit.workload.losses import CountedLoss, ShareLoss
from labkit.workload.transformer import Block, gpt
from workbook.gpt_step import GPT
from workbook.measure.record import Spread, Table

SAMPLES = 12
MODEL = GPT(layers=4, width=48, heads=12, length=16, vocabulary=64)
FORWARD_S = 3e-3  # of a block, for one sample
LINK = Link(1e-3, 1e-7)
_LINK = EmulatedLink(LINK.alpha_s, 1 / LINK.beta_s_per_byte)
_run = partial(labkit.run, device="cpu", link=_LINK)
MICRO_BATCHES = 4
BUCKET_MB = 0.1
# The emulated blocks have no experts to divide.
TECHNIQUES = tuple(name for name in strategies.STRATEGIES if name != "expert_parallel")
# A prediction within this relative error is called right.
CLOSE = 0.2


class EmulatedBlock(Block):
    """A block that takes ``FORWARD_S`` a sample, and less if it is cut over ranks.

    On a straggler it takes ``slowdown`` times as long.
    """

    slowdown = 1.0

    def forward(self, x: Tensor) -> Tensor:
        num_parameters = sum(parameter.numel() for parameter in self.parameters())
        seconds = len(x) * FORWARD_S * num_parameters / MODEL.block_parameters * self.slowdown
        if x.is_meta:
            seconds = 0.0
        time.sleep(seconds)
        outputs = super().forward(x)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: time.sleep(2 * seconds))
        # Others' hooks on what is returned are called before this one.
        return outputs.view_as(outputs)


def build() -> nn.Sequential:
    """The same model on all ranks."""
    torch.manual_seed(0)
    sizes = {"width": MODEL.width, "num_heads": MODEL.heads, "num_blocks": MODEL.layers}
    model = nn.Sequential(*gpt((MODEL.length,), MODEL.vocabulary, **sizes))
    for layer in model:
        if isinstance(layer, Block):
            layer.__class__ = EmulatedBlock
    return model


def mesh_tp(ranks: int) -> int:
    """The side of the mesh over which layers are cut: two, if the ranks can be halved."""
    return math.gcd(2, ranks)


def options_of(name: str, ranks: int) -> dict[str, Any]:
    """The options with which a technique runs."""
    # Layer 0 is the embedding.
    cuts = [1 + start for start, _ in chunk_bounds(MODEL.layers, ranks)[1:]]
    tp = mesh_tp(ranks)
    return {
        "data_parallel": {"devices": ("cpu",) * ranks},
        "ddp": {"bucket_mb": BUCKET_MB},
        "model_parallel": {"split_points": cuts},
        "pipeline": {"split_points": cuts, "micro_batches": MICRO_BATCHES},
        "mesh": {"dp": ranks // tp, "tp": tp, "micro_batches": 1},
    }.get(name, {})


def predicted_s(name: str, ranks: int, link: Link = LINK, call_s: float = 0.0) -> float:
    """Seconds of a step, on paper: a block's forward takes ``FORWARD_S`` a sample and ``call_s``.

    ``look`` measures ``link`` and ``call_s``; by default they are what is emulated.
    """
    if name not in ("single", "model_parallel"):
        # Ranks that work at once share the cores.
        call_s *= max(1, ranks / num_cores())
    model = StepModel(ranks, link, call_s)
    if name == "ddp":
        return model.ddp_s()
    if name == "model_parallel":
        return model.stages_s(1)
    if name == "pipeline":
        return model.stages_s(MICRO_BATCHES)
    if name == "sharded":
        return model.sharded_s()
    if name == "tensor_parallel":
        return model.tensor_parallel_s(ranks)
    if name == "mesh":
        return model.tensor_parallel_s(mesh_tp(ranks))
    num_bytes = model.total_bytes
    workers = max(1, ranks - 1)
    replica_s = 3 * model.blocks_s(SAMPLES / ranks)
    worker_s = 3 * model.blocks_s(SAMPLES / workers)
    serve_s = 2 * (link.message_seconds(num_bytes) + link.alpha_s)
    return {
        "single": 3 * model.blocks_s(SAMPLES),
        "data_parallel": replica_s,
        "ring_all_reduce": replica_s + model.all_reduce_s(num_bytes, ranks),
        "parameter_server": worker_s + parameter_server_seconds(num_bytes, workers, 1, link),
        # A worker waits for its own push and pull, or for those of all others.
        "async_parameter_server": max(worker_s + serve_s, workers * serve_s),
    }[name]


@dataclass
class StepModel:
    """A step of the emulated transformer on P ranks; ``call_s`` is what a block's call takes."""

    ranks: int
    link: Link
    call_s: float

    def __post_init__(self) -> None:
        # Bytes of the gradients by layer; the last layer is the embedding again.
        self.layer_bytes = []
        for layer in list(build())[:-1]:
            self.layer_bytes.append([4 * parameter.numel() for parameter in layer.parameters()])
        self.gradient_bytes = list(itertools.chain(*self.layer_bytes))
        self.total_bytes = sum(self.gradient_bytes)

    def blocks_s(self, samples: float, part: float = 1.0) -> float:
        """Forward of all blocks for some of the samples, of a part of each block."""
        return MODEL.layers * (math.ceil(samples) * FORWARD_S * part + self.call_s)

    def all_reduce_s(self, num_bytes: float, ranks: int) -> float:
        return all_reduce_seconds("ring", num_bytes, ranks, self.link)

    def ddp_s(self) -> float:
        """The forward, then the backward, during which buckets are reduced."""
        replica_s = self.blocks_s(SAMPLES / self.ranks)
        ready_s = []
        for layer, sizes in enumerate(self.layer_bytes):
            # The last block's gradients are ready first, the embedding's with those of block 0.
            blocks_done = min(MODEL.layers, len(self.layer_bytes) - 1 - layer)
            ready_s += [2 * replica_s / MODEL.layers * blocks_done] * len(sizes)
        cap_bytes = BUCKET_MB * MIB
        model = predict_step(self.gradient_bytes, ready_s, cap_bytes, self.ranks, self.link)
        return replica_s + model.step_s

    def stages_s(self, micro_batches: int) -> float:
        """Stages that pass micro-batches on, as GPipe does; one micro-batch: the naive split."""
        samples = SAMPLES / micro_batches
        hop_s = self.link.message_seconds(4 * samples * MODEL.length * MODEL.width)
        forward_s = []
        backward_s = []
        for start, end in chunk_bounds(MODEL.layers, self.ranks):
            stage_s = self.blocks_s(samples) * (end - start) / MODEL.layers
            forward_s.append(stage_s + hop_s)
            backward_s.append(2 * stage_s + hop_s)
        # A stage that sends waits until the message has arrived; the ends send one way only.
        forward_s[-1] -= hop_s
        backward_s[0] -= hop_s
        streams = pipeline_streams("gpipe", self.ranks, micro_batches)
        step_s = max(slot.end_s for slot in predicted_slots(streams, forward_s, backward_s))
        if self.ranks > 1:
            # The first and the last stage add up the gradients of the tied embedding.
            step_s += 2 * self.link.message_seconds(self.gradient_bytes[0])
        return step_s

    def sharded_s(self) -> float:
        """Stage 3: a thread computes, unit by unit, while another one sends."""
        replica_s = self.blocks_s(SAMPLES / self.ranks)
        units = range(len(self.layer_bytes))
        now_s = 0.0
        link_free_s = 0.0
        message_ends_s: dict[int, float] = {}
        uses = [*([unit] for unit in units), [0]]
        for kind, unit in sharded_pass(3, uses, units):
            is_block = 1 <= unit <= MODEL.layers
            if kind in ("gather", "reduce"):
                half_s = self.all_reduce_s(sum(self.layer_bytes[unit]), self.ranks) / 2
                link_free_s = max(now_s, link_free_s) + half_s
                message_ends_s[unit] = link_free_s
            elif kind in ("wait", "finish"):
                now_s = max(now_s, message_ends_s[unit])
            elif kind == "forward" and is_block:
                now_s += replica_s / MODEL.layers
            elif kind == "backward" and is_block:
                now_s += 2 * replica_s / MODEL.layers
        return now_s

    def tensor_parallel_s(self, tp: int) -> float:
        """Layers cut over ``tp`` ranks, and replicas of those on the other ranks."""
        samples = SAMPLES * tp // self.ranks
        # Norms and biases of sums in the blocks, the last norm, positions.
        replicated = MODEL.width * (6 * MODEL.layers + 2 + MODEL.length)
        shape = (samples, MODEL.length, MODEL.width)
        cost = tensor_parallel_cost(shape, MODEL.layers, replicated, 4, tp)
        cut_s = cost.messages * self.link.alpha_s + cost.num_bytes * self.link.beta_s_per_byte
        reduce_s = self.all_reduce_s(self.total_bytes / tp, self.ranks // tp)
        return 3 * self.blocks_s(samples, 1 / tp) + cut_s + reduce_s


def steps_of(comm: Comm, name: str, ranks: int, repeats: int) -> list[float]:
    """Seconds of this rank's steps, after one that warms up; asynchronous ones on the server.

    A ``data`` span begins each of them.
    """
    strategy = strategies.get(name)(**options_of(name, ranks))
    strategy.loss = CountedLoss(ShareLoss(functional.cross_entropy))
    strategy.setup(comm, build(), partial(torch.optim.SGD, lr=0.01))
    tokens = torch.arange(SAMPLES * (MODEL.length + 1)).view(SAMPLES, -1) % MODEL.vocabulary
    texts = tokens[strategy.part_of(torch.arange(SAMPLES))]
    batch = (texts[:, :-1], texts[:, 1:].contiguous(), SAMPLES)
    seconds = []
    if isinstance(strategy, AsyncParameterServer):
        # A step is as many pushes as there are workers.
        ends = strategy.train(itertools.repeat(batch), 1, repeats + 1)
        for (before, _), (after, _) in itertools.pairwise([*ends]):
            seconds.append(after - before)
    else:
        for _ in range(repeats + 1):
            comm.barrier()
            start_s = time.perf_counter()
            with comm.span("data"):
                pass
            strategy.step(*batch)
            seconds.append(time.perf_counter() - start_s)
    strategy.close()
    return seconds[-repeats:]


def measured_s(
    ranks: int, names: Sequence[str] = TECHNIQUES, repeats: int = 3
) -> dict[str, list[float]]:
    """Seconds of each technique's steps on ``ranks`` ranks: those of the slowest rank."""

    def all_steps(comm: Comm, names: Sequence[str]) -> list[list[float]]:
        torch.set_num_threads(1)
        return [steps_of(comm, name, ranks, repeats) for name in names]

    alone = []
    together = []
    for name in names:
        if name == "single" or strategies.get(name).traits.in_one_process:
            alone.append(name)
        else:
            together.append(name)
    seconds = {}
    for world_size, group in ((1, alone), (ranks, together)):
        if group:
            result = _run(all_steps, group, world_size=world_size)
            for name, by_rank in zip(group, zip(*result.values)):
                # An asynchronous worker has no steps: the server counts them.
                seconds[name] = list(map(max, zip(*filter(None, by_rank))))
    return {name: seconds[name] for name in names}


def look(ranks: int) -> tuple[Link, float]:
    """The two numbers that the model needs: a message's cost, and a block's call in seconds."""
    sizes = (2**8, 2**12, 2**16)
    emulated = {"device": "cpu", "link": _LINK}
    link = measure_link(ranks, "exchange", sizes_bytes=sizes, repeats=5, **emulated)
    step_s = statistics.median(measured_s(1, ["single"])["single"])
    calls_s = step_s - predicted_s("single", 1)
    return link, max(0.0, calls_s / (3 * MODEL.layers))


def beside(
    measured: Mapping[str, Sequence[float]], ranks: int, link: Link, call_s: float
) -> Table:
    """Model and measurement of each technique, with the error of the model.

    From one device's step ``look`` has the time of a call, so that row is not counted.
    """
    rows = []
    num_predicted = 0
    num_close = 0
    for name, steps in measured.items():
        model_s = predicted_s(name, ranks, link, call_s)
        spread = Spread.of(steps)
        error = model_s / spread.median - 1
        if name != "single":
            num_predicted += 1
            num_close += abs(error) <= CLOSE
        measured_text = spread.text(format_seconds)
        rows.append((name, format_seconds(model_s), measured_text, f"{error:+.0%}"))
    heads = ("technique", "step (predicted)", "measured (quartiles)", "error")
    note = f"{num_close} of {num_predicted} within {CLOSE:.0%} on {ranks} emulated devices."
    return Table(heads, tuple(rows), (note,))
