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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import labkit
from labkit import strategies
from labkit.comm.comm import Comm
from labkit.comm.emulated_link import EmulatedLink
from labkit.costs.ddp_step import predict_step
from labkit.costs.gpt_step import GPT
from labkit.costs.link import Link, all_reduce_seconds, parameter_server_seconds
from labkit.costs.pipeline_timeline import predicted_slots
from labkit.costs.traffic import tensor_parallel_cost
from labkit.devices import num_cores
from labkit.schedules.bucket_assignment import MIB
from labkit.schedules.pipeline import pipeline_streams
from labkit.schedules.ring import chunk_bounds
from labkit.schedules.sharding import sharded_pass
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.training.measured import measure_link
from labkit.units import format_seconds
from labkit.workload.losses import CountedLoss, ShareLoss
from labkit.workload.transformer import Block, gpt
from workbook.measure.record import Spread, Table

SAMPLES, MODEL = 12, GPT(layers=4, width=48, heads=12, length=16, vocabulary=64)
# Seconds of a block's forward for one sample, and of a message over the link.
FORWARD_S, LINK = 3e-3, Link(1e-3, 1e-7)
_LINK = EmulatedLink(LINK.alpha_s, 1 / LINK.beta_s_per_byte)
_run = partial(labkit.run, device="cpu", link=_LINK)
MICRO_BATCHES, BUCKET_MB = 4, 0.1
# A prediction within this relative error is called right.
CLOSE = 0.2


class EmulatedBlock(Block):
    """A block that takes ``FORWARD_S`` a sample, and less if it is cut over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        own = sum(parameter.numel() for parameter in self.parameters()) / MODEL.block_parameters
        seconds = 0.0 if x.is_meta else len(x) * FORWARD_S * own
        time.sleep(seconds)
        outputs = super().forward(x)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: time.sleep(2 * seconds))
        # Others' hooks on what is returned are called before this one.
        return outputs.view_as(outputs)


def build() -> nn.Sequential:
    """The same model on all ranks."""
    torch.manual_seed(0)
    sizes = {"width": MODEL.width, "num_heads": MODEL.heads, "num_blocks": MODEL.layers}
    model = nn.Sequential(*gpt((MODEL.length,), MODEL.vocabulary, **sizes))
    for layer in model:
        layer.__class__ = EmulatedBlock if isinstance(layer, Block) else type(layer)
    return model


def options_of(name: str, ranks: int) -> dict[str, Any]:
    """The options with which a technique runs."""
    cuts = [1 + start for start, _ in chunk_bounds(MODEL.layers, ranks)][1:]
    tp = 1 + (ranks % 2 == 0)
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
    by_layer = [[4 * p.numel() for p in layer.parameters()] for layer in [*build()][:-1]]
    sizes, layers, workers = [s for own in by_layer for s in own], MODEL.layers, max(1, ranks - 1)
    reduce_s = partial(all_reduce_seconds, "ring", link=link)
    # Ranks that work at once share the cores.
    call_s *= 1 if name in ("single", "model_parallel") else max(1, ranks / num_cores())

    def blocks_s(samples: float, part: float = 1.0) -> float:
        """Forward of all blocks for some of the samples, of a part of each block."""
        return layers * (math.ceil(samples) * FORWARD_S * part + call_s)

    replica_s, worker_s = blocks_s(SAMPLES / ranks), blocks_s(SAMPLES / workers)
    if name == "ddp":
        # The last block's gradients are ready first, the embeddings' with those of block 0.
        ends = [min(layers, len(by_layer) - 1 - n) for n in range(len(by_layer))]
        ready_s = [2 * replica_s / layers * n for n, own in zip(ends, by_layer) for _ in own]
        return replica_s + predict_step(sizes, ready_s, BUCKET_MB * MIB, ranks, link).step_s
    if name in ("model_parallel", "pipeline"):
        m, bounds = (MICRO_BATCHES, 1)[name == "model_parallel"], chunk_bounds(layers, ranks)
        hop_s = link.message_seconds(4 * SAMPLES / m * MODEL.length * MODEL.width)
        each_s = [blocks_s(SAMPLES / m) * (end - start) / layers for start, end in bounds]
        # A stage that sends waits until the message has arrived.
        forward_s = [s + hop_s * (n < ranks - 1) for n, s in enumerate(each_s)]
        backward_s = [2 * s + hop_s * (n > 0) for n, s in enumerate(each_s)]
        slots = predicted_slots(pipeline_streams("gpipe", ranks, m), forward_s, backward_s)
        # The first and the last stage add up the gradients of the tied embedding.
        tied_s = (ranks > 1) * 2 * link.message_seconds(sizes[0])
        return max(slot.end_s for slot in slots) + tied_s
    if name == "sharded":
        # One thread computes, unit by unit, while another one sends.
        uses, now_s, free_s, ends_s = [[n] for n in range(len(by_layer))] + [[0]], 0.0, 0.0, {}
        for kind, n in sharded_pass(3, uses, range(len(by_layer))):
            if kind in ("gather", "reduce"):
                ends_s[n] = free_s = max(now_s, free_s) + reduce_s(sum(by_layer[n]), ranks) / 2
            elif kind in ("wait", "finish"):
                now_s = max(now_s, ends_s[n])
            elif kind in ("forward", "backward") and 1 <= n <= layers:
                now_s += replica_s / layers * (1 + (kind == "backward"))
        return now_s
    if name in ("tensor_parallel", "mesh"):
        tp = options_of("mesh", ranks)["tp"] if name == "mesh" else ranks
        shape = (SAMPLES * tp // ranks, MODEL.length, MODEL.width)
        # Norms and biases of sums in the blocks, the last norm, positions.
        replicated = MODEL.width * (6 * layers + 2 + MODEL.length)
        cut = tensor_parallel_cost(shape, layers, replicated, 4, tp)
        cut_s = cut.messages * link.alpha_s + cut.num_bytes * link.beta_s_per_byte
        return 3 * blocks_s(shape[0], 1 / tp) + cut_s + reduce_s(sum(sizes) / tp, ranks // tp)
    serve_s = 2 * (link.message_seconds(sum(sizes)) + link.alpha_s)
    return {
        "single": 3 * blocks_s(SAMPLES),
        "data_parallel": 3 * replica_s,
        "ring_all_reduce": 3 * replica_s + reduce_s(sum(sizes), ranks),
        "parameter_server": 3 * worker_s + parameter_server_seconds(sum(sizes), workers, 1, link),
        # A worker waits for its own push and pull, or for those of all others.
        "async_parameter_server": max(3 * worker_s + serve_s, workers * serve_s),
    }[name]


def _steps(comm: Comm, name: str, ranks: int, repeats: int) -> list[float]:
    """Seconds of this rank's steps, after one that warms up; asynchronous ones on the server."""
    strategy = strategies.get(name)(**options_of(name, ranks))
    strategy.loss = CountedLoss(ShareLoss(functional.cross_entropy))
    strategy.setup(comm, build(), partial(torch.optim.SGD, lr=0.01))
    tokens = torch.arange(SAMPLES * (MODEL.length + 1)).view(SAMPLES, -1) % MODEL.vocabulary
    mine = tokens[strategy.part_of(torch.arange(SAMPLES))]
    batch = mine[:, :-1], mine[:, 1:].contiguous(), SAMPLES
    if isinstance(strategy, AsyncParameterServer):
        # A step is as many pushes as there are workers.
        ends = strategy.train(itertools.repeat(batch), 1, repeats + 1)
        seconds = [after - before for (before, _), (after, _) in itertools.pairwise([*ends])]
    else:
        seconds = []
        for _ in range(repeats + 1):
            comm.barrier()
            start_s = time.perf_counter()
            strategy.step(*batch)
            seconds.append(time.perf_counter() - start_s)
    strategy.close()
    return seconds[-repeats:]


def measured_s(
    ranks: int, names: Sequence[str] = strategies.STRATEGIES, repeats: int = 3
) -> dict[str, list[float]]:
    """By technique, seconds of its steps on ``ranks`` ranks: of the one that took longest."""

    def all_steps(comm: Comm, names: Sequence[str]) -> list[list[float]]:
        torch.set_num_threads(1)
        return [_steps(comm, name, ranks, repeats) for name in names]

    found: dict[str, list[float]] = {}
    alone = [n for n in names if n == "single" or strategies.get(n).in_one_process]
    for world_size, some in ((1, alone), (ranks, [n for n in names if n not in alone])):
        by_rank = _run(all_steps, some, world_size=world_size).values if some else []
        for name, rows in zip(some, zip(*by_rank)):
            found[name] = [max(step) for step in zip(*filter(None, rows))]
    return {name: found[name] for name in names}


def look(ranks: int) -> tuple[Link, float]:
    """What a model has to know: a message between ranks, and what a block's call takes itself."""
    how = {"sizes_bytes": (2**8, 2**12, 2**16), "repeats": 5, "device": "cpu", "link": _LINK}
    link = measure_link(ranks, "exchange", **how)
    (steps,) = measured_s(1, ["single"]).values()
    own_s = statistics.median(steps) - predicted_s("single", 1)
    return link, max(0.0, own_s / (3 * MODEL.layers))


def beside(
    measured: Mapping[str, Sequence[float]], ranks: int, link: Link, call_s: float
) -> Table:
    """Model and measurement of each technique, with the error of the model.

    From one device's step ``look`` has the time of a call, so that row is not counted.
    """
    rows, close = [], []
    for name, steps in measured.items():
        model_s, spread = predicted_s(name, ranks, link, call_s), Spread.of(steps)
        error = model_s / spread.median - 1
        close += [abs(error) <= CLOSE] * (name != "single")
        shown = spread.text(format_seconds)
        rows.append((name, format_seconds(model_s), shown, f"{error:+.0%}"))
    heads = ("technique", "step (model)", "measured (quartiles)", "model's error")
    note = f"{sum(close)} of {len(close)} within {CLOSE:.0%} on {ranks} emulated devices."
    return Table(heads, tuple(rows), (note,))
