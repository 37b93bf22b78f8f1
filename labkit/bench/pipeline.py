"""``labkit bench pipeline``: a step of a pipeline, ours beside PyTorch's and an unpipelined split.

All contenders train copies of one model, cut at the same layers, on the same samples, in one run:
ours in shared memory and on gloo, ``torch.distributed.pipelining`` on gloo, the split without
micro-batches, and one device, for which rank 0 has all cores while the others wait. Then, for each
schedule, a duel: ours and PyTorch's on the same transport, the two alone in turns, because a few
percent take many pairs to be seen.
"""

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from labkit import devices
from labkit.bench.pipeline_result import (
    DUELS,
    MICRO_BATCHES,
    ONE_DEVICE,
    OURS,
    OURS_1F1B,
    UNPIPELINED,
    PipelineResult,
)
from labkit.bench.turns import slowest, take_turns, timed
from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.placement.even_split import even_split
from labkit.runtime.launch import run
from labkit.strategies.builtin.pipeline import TorchPipeline
from labkit.strategies.model_parallel import ModelParallel
from labkit.strategies.pipeline import Pipeline
from labkit.strategies.single import Single
from labkit.strategies.stage import StagedModel
from labkit.training.state import largest_difference
from labkit.units import check_integer
from labkit.workload.models import build_model

SHAPE = (3, 32, 32)
NUM_CLASSES = 10
# Micro-batches must not be small: each adds its gradients to all of a model's parameters, of which
# vgg16 has most.
BATCH_SIZES = {"vgg16": 64}
BATCH_SIZE = 32
MODELS = ("vgg16", "resnet18")
_LEARNING_RATE = 1e-3
_COMPARED_STEPS = 2
_BUDGET_S, _DUEL_BUDGET_S = 60.0, 150.0
_TIMEOUT_S = 1800
# OpenMP's threads stay awake for 0.2 s after their last work.
_SPIN_S = 0.3


def bench_pipeline(
    world_sizes: tuple[int, ...] = (2,),
    models: tuple[str, ...] = MODELS,
    repeats: int = 10,
) -> Iterator[PipelineResult]:
    """Time steps on the CPU, one result for each model and number of stages.

    Args:
        world_sizes: stages, each at least 2.
        models: of ``labkit.workload.models``, on images of 3x32x32.
        repeats: steps at most, and pairs of each duel; slow models get fewer, at least 5.

    Raises:
        ValueError: an impossible number of stages or an unknown model, before anything runs.
        WorkerError: a step failed.
    """
    check_integer("repeats", repeats)
    for world_size in world_sizes:
        devices.check_world_size(world_size)
        if world_size < 2:
            raise ValueError(f"a pipeline has 2 stages or more, got world size {world_size}")
    built = {name: _build(name) for name in models}
    splits = {
        world_size: {name: _split(name, model, world_size) for name, model in built.items()}
        for world_size in world_sizes
    }
    return _results(splits, repeats)


def _split(name: str, model: nn.Sequential, world_size: int) -> tuple[int, ...]:
    if world_size > len(model):
        raise ValueError(
            f"model {name} has {len(model)} layers, at least one for each stage: use world size "
            f"{len(model)} or less, got {world_size}"
        )
    points = even_split(model, SHAPE, world_size)
    for schedule in DUELS:
        TorchPipeline(points, MICRO_BATCHES, schedule).check_ranks(world_size)
    return points


def _results(
    splits: dict[int, dict[str, tuple[int, ...]]], repeats: int
) -> Iterator[PipelineResult]:
    for world_size, by_model in splits.items():
        for name, points in by_model.items():
            batch_size = BATCH_SIZES.get(name, BATCH_SIZE)
            result = run(
                measure,
                name,
                points,
                batch_size,
                repeats,
                world_size=world_size,
                device="cpu",
                timeout_s=_TIMEOUT_S,
            )
            mine = result.values[0]
            yield PipelineResult(
                name,
                world_size,
                points,
                batch_size,
                slowest([rank["seconds"] for rank in result.values]),
                mine["difference"],
                slowest([rank["duels"] for rank in result.values]),
            )


def _build(name: str) -> nn.Sequential:
    return build_model(name, num_classes=NUM_CLASSES, input_shape=SHAPE, seed=0)


def measure(
    comm: Comm, model: str, points: tuple[int, ...], batch_size: int, repeats: int
) -> dict:
    """On each rank: seconds by contender and in the duels, and how far all are from our GPipe."""
    base = _build(model)
    optimizer = partial(torch.optim.SGD, lr=_LEARNING_RATE, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(batch_size, *SHAPE, generator=generator)
    classes = torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
    steps: dict[str, Callable[[], object]] = {}
    states = {}
    for name, (strategy, through) in _contenders(comm, points).items():
        strategy.setup(through, copy.deepcopy(base), optimizer)
        steps[name] = partial(strategy.step, samples, classes, batch_size)
        for _ in range(_COMPARED_STEPS):
            steps[name]()
        states[name] = strategy.full_state()
    steps[ONE_DEVICE] = _on_one_device(comm, base, optimizer, samples, classes)
    turns = {name: partial(timed, comm, step) for name, step in steps.items()}
    turns[ONE_DEVICE] = partial(_then_quiet, turns[ONE_DEVICE])
    difference = {name: largest_difference(s, states[OURS]) for name, s in states.items()}
    duels = {schedule: {name: turns[name] for name in pair} for schedule, pair in DUELS.items()}
    return {
        "seconds": take_turns(comm, turns, repeats, _BUDGET_S),
        "difference": difference | {ONE_DEVICE: None},
        "duels": {
            schedule: take_turns(comm, pair, repeats, _DUEL_BUDGET_S)
            for schedule, pair in duels.items()
        },
    }


def _contenders(comm: Comm, points: tuple[int, ...]) -> dict[str, tuple[StagedModel, Comm]]:
    """The strategies, and what each sends through; PyTorch's go their own way, over gloo."""
    on_gloo = Comm(comm.rank, comm.world_size, comm.device, TorchTransport("gloo", comm.device))
    found: dict[str, tuple[StagedModel, Comm]] = {
        OURS: (Pipeline(points, MICRO_BATCHES), comm),
        OURS_1F1B: (Pipeline(points, MICRO_BATCHES, "1f1b"), comm),
        UNPIPELINED: (ModelParallel(points), comm),
    }
    for schedule, (ours, torchs) in DUELS.items():
        found[ours] = Pipeline(points, MICRO_BATCHES, schedule), on_gloo
        found[torchs] = TorchPipeline(points, MICRO_BATCHES, schedule), comm
    return found


def _on_one_device(comm: Comm, base: nn.Module, optimizer, samples, classes) -> Callable[[], None]:
    """Rank 0 trains the whole model with all cores; the others wait for it."""
    alone = Comm(0, 1, comm.device, TorchTransport("gloo", comm.device))
    single, threads = Single(), torch.get_num_threads()
    single.setup(alone, copy.deepcopy(base), optimizer)

    def step() -> None:
        if comm.rank == 0:
            torch.set_num_threads(devices.num_cores())
            single.step(samples, classes, len(classes))
            torch.set_num_threads(threads)

    return step


def _then_quiet(turn: Callable[[], float]) -> float:
    """A turn, and until the threads that it has used no longer spin: the next one wants a core."""
    seconds = turn()
    time.sleep(_SPIN_S)
    return seconds
