"""``labkit bench ddp``, ``sharded``, ``tensor-parallel``, ``pipeline``, ``schedules``: in turns.

Contenders take the same samples, and end with the same parameters. For DDP only the backend
changes, or whose DDP it is. Sharding is compared with our DDP, and with PyTorch's, stage by stage.
Pipelines are cut at the same layers: ours in shared memory and on gloo,
``torch.distributed.pipelining`` on gloo, and the split without micro-batches. On GPUs, NCCL takes
the place of gloo. Schedules are compared on emulated devices, because few machines have a core for
each stage.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.costs.pipeline_timeline import bubble, predicted_slots
from labkit.placement.profile import even_split
from labkit.schedules.pipeline import PIPELINES, pipeline_streams, stages_on_each
from labkit.strategies.base import Strategy
from labkit.strategies.builtin.ddp import TorchDDP
from labkit.strategies.builtin.pipeline import TorchPipeline
from labkit.strategies.builtin.sharded import TorchSharded
from labkit.strategies.builtin.tensor_parallel import TorchTensorParallel
from labkit.strategies.ddp import DDP
from labkit.strategies.model_parallel import ModelParallel, Pipeline
from labkit.strategies.sharded import Sharded
from labkit.strategies.tensor_parallel import TensorParallel
from labkit.training.measured import measure_split
from labkit.training.result import largest_difference
from labkit.workload.layers import EmulatedLayer
from labkit.workload.models import build_model
from workbook.measure.record import Result
from workbook.measure.turns import Turn, Where, on_ranks, take_turns, timed

SHAPE, NUM_CLASSES = (3, 32, 32), 10
# Of gpt.
LENGTH, VOCABULARY = 64, 64
MICRO_BATCHES, SCHEDULES = 4, ("gpipe", "1f1b")
_COMPARED_STEPS = 2
# Of a step on emulated devices: samples, micro-batches, seconds of a rank's forward of a sample.
EMULATED = 64, 8, 0.012

# The strategies by name, each with the Comm for its messages; the first is the reference.
Contenders = dict[str, tuple[Strategy, Comm]]


def build(model: str) -> torch.nn.Sequential:
    """A model for images of 3x32x32, or texts, the same on every rank."""
    if model == "gpt":
        return build_model(model, num_classes=VOCABULARY, input_shape=(LENGTH,), seed=0)
    return build_model(model, num_classes=NUM_CLASSES, input_shape=SHAPE, seed=0)


def step_of(
    strategy: Strategy, comm: Comm, model: str, batch_size: int
) -> Callable[[], torch.Tensor]:
    """Set a strategy up to train a model on random samples, the same by rank: its step."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(batch_size, *SHAPE, generator=generator)
    classes = torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
    if model == "gpt":
        texts = torch.randint(VOCABULARY, (batch_size, LENGTH + 1), generator=generator)
        samples, classes = texts[:, :-1], texts[:, 1:]
    strategy.setup(comm, build(model), partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
    inputs, targets = (strategy.part_of(each).to(comm.device) for each in (samples, classes))
    return partial(strategy.step, inputs, targets, batch_size)


def bench_ddp(world_size: int, model: str, repeats: int, where: Where) -> Iterator[Result]:
    """Time steps of DDP: forward, backward, update."""

    def contenders(comm: Comm) -> Contenders:
        backend = dist.get_backend()
        found: Contenders = {f"torch on {backend}": (TorchDDP(), comm)}
        if comm.device.type == "cpu":
            found["torch on labkit"] = TorchDDP(backend="labkit"), comm
        return found | {"labkit": (DDP(), comm)}

    # Few samples, so that communication is a large part of a step.
    batch_size = world_size * {"small_cnn": 32, "vgg16": 4}.get(model, 8)
    yield _steps("DDP", contenders, world_size, model, batch_size, repeats, where)


def bench_sharded(world_size: int, model: str, repeats: int, where: Where) -> Iterator[Result]:
    """Time steps of sharded data parallelism in its stages, and of DDP."""

    def contenders(comm: Comm) -> Contenders:
        backend = dist.get_backend()
        found: Contenders = {"labkit ddp": (DDP(), comm)}
        for stage in (1, 2, 3):
            found[f"labkit stage {stage}"] = Sharded(stage=stage), comm
            found[f"torch stage {stage} on {backend}"] = TorchSharded(stage=stage), comm
        return found

    batch_size = world_size * 8
    yield _steps("sharding", contenders, world_size, model, batch_size, repeats, where)


def bench_tensor_parallel(
    world_size: int, model: str, repeats: int, where: Where
) -> Iterator[Result]:
    """Time steps of a transformer whose layers are cut, by our collectives and by DTensor's."""

    def contenders(comm: Comm) -> Contenders:
        found: Contenders = {f"torch on {dist.get_backend()}": (TorchTensorParallel(), comm)}
        found["labkit"] = TensorParallel(), comm
        return found | {
            "labkit, sequence parallel": (TensorParallel(sequence_parallel=True), comm)
        }

    # Each rank has the whole batch.
    yield _steps("tensor parallelism", contenders, world_size, model, 16, repeats, where)


def bench_pipeline(world_size: int, model: str, repeats: int, where: Where) -> Iterator[Result]:
    """Time steps of pipelines with as many stages as ranks."""

    def contenders(comm: Comm) -> Contenders:
        points, backend = even_split(build(model), SHAPE, comm.world_size), dist.get_backend()
        transport = TorchTransport(backend, comm.device)
        plainly = Comm(comm.rank, comm.world_size, comm.device, transport)
        found: Contenders = {"labkit split, not pipelined": (ModelParallel(points), comm)}
        for schedule in SCHEDULES:
            how = points, MICRO_BATCHES, schedule
            found[f"labkit {schedule}"] = Pipeline(*how), comm
            found[f"labkit {schedule} on {backend}"] = Pipeline(*how), plainly
            # PyTorch's send from GPU to GPU, and gloo sends host memory only.
            if comm.device.type == "cpu" or backend == "nccl":
                found[f"torch {schedule} on {backend}"] = TorchPipeline(*how), comm
        return found

    # Micro-batches must not be small: each adds its gradients to those of all parameters.
    batch_size = {"vgg16": 64}.get(model, 32)
    title = f"pipelines with {MICRO_BATCHES} micro-batches"
    yield _steps(title, contenders, world_size, model, batch_size, repeats, where)


def bench_schedules(world_size: int, repeats: int, where: Where) -> Iterator[Result]:
    """Time steps of emulated devices by schedule: their bubbles beside those of the timetables."""
    batch_size, micro_batches, sample_s = EMULATED
    seconds, idle, paper = dict[str, list[float]](), dict[str, float](), dict[str, float]()
    for name in PIPELINES:
        chunks = stages_on_each(name)
        stages = [EmulatedLayer(sample_s / chunks) for _ in range(world_size * chunks)]
        # A first layer that takes no time, so that the first stage's input has a gradient.
        model, points = nn.Sequential(EmulatedLayer(0.0), *stages), range(2, len(stages) + 1)
        batch: Any = {"batch_size": batch_size, "input_shape": (4,), "steps": repeats, **where}
        how = {"micro_batches": micro_batches, "schedule": name}
        measured = measure_split(model, points, **how, **batch)
        busy_s = statistics.fmean((*measured.forward_s, *measured.backward_s)) * 2
        seconds[name] = measured.step_s
        idle[name] = 1 - busy_s / statistics.median(measured.step_s)
        equal = [1.0] * len(stages)
        streams = pipeline_streams(name, world_size, micro_batches)
        paper[name] = bubble(predicted_slots(streams, equal, [2 * one for one in equal]))
    yield Result(
        f"Step by schedule: {world_size} emulated devices, {micro_batches} micro-batches; bubble: "
        "the share of their time in which they compute nothing, measured and on paper",
        {"world_size": world_size, "batch_size": batch_size, "micro_batches": micro_batches},
        {"": seconds},
        ("1f1b",),
        columns={"bubble": {"": idle}, "timetable": {"": paper}},
    )


def _steps(
    title: str,
    contenders: Callable[[Comm], Contenders],
    world_size: int,
    model: str,
    batch_size: int,
    repeats: int,
    where: Where,
) -> Result:
    def measure(comm: Comm) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Seconds of steps, and how far apart the models are after two."""
        turns, states = dict[str, Turn](), {}
        for name, (strategy, through) in contenders(comm).items():
            step = step_of(strategy, through, model, batch_size)
            for _ in range(_COMPARED_STEPS):
                step()
            turns[name], states[name] = partial(timed, comm, step), strategy.full_state()
        truth = next(iter(states.values()))
        apart = {name: largest_difference(one, truth) for name, one in states.items()}
        return take_turns(turns, repeats), apart

    seconds, difference = on_ranks(measure, world_size=world_size, where=where)
    reference, *others = seconds
    return Result(
        f"Step of {title}: {model}, {world_size} ranks, a batch of {batch_size}, in turns; "
        f"difference: of the parameters from those of {reference}",
        {"model": model, "world_size": world_size, "batch_size": batch_size},
        {"": seconds},
        (reference, *(name for name in others if name.startswith("torch"))),
        columns={"difference": {"": difference}},
    )
