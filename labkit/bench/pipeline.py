"""``labkit bench pipeline``: a step of a pipeline, ours beside PyTorch's and an unpipelined split.

All contenders train copies of one model, cut at the same layers, on the same samples, in one run:
ours in shared memory and on gloo, ``torch.distributed.pipelining`` on gloo, the split without
micro-batches, and one device, for which rank 0 has all cores while the others wait. Then, for each
schedule, a duel: ours and PyTorch's on the same transport take turns without the others, because
a difference of a few percent shows only in many pairs.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from labkit import devices
from labkit.bench.model_step import SHAPE, ModelStep, build
from labkit.bench.pipeline_result import (
    DUELS,
    MICRO_BATCHES,
    ONE_DEVICE,
    OURS,
    OURS_1F1B,
    UNPIPELINED,
    PipelineResult,
)
from labkit.bench.turns import TIMEOUT_S, check_settings, slowest, take_turns, timed
from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.placement.even_split import even_split
from labkit.runtime.launch import run
from labkit.strategies.base import Strategy
from labkit.strategies.builtin.pipeline import TorchPipeline
from labkit.strategies.model_parallel import ModelParallel
from labkit.strategies.pipeline import Pipeline
from labkit.strategies.single import Single
from labkit.training.state import largest_difference

# Micro-batches must not be small: each adds its gradients to all of a model's parameters, and
# vgg16 has most.
BATCH_SIZES = {"vgg16": 64}
BATCH_SIZE = 32
MODELS = ("vgg16", "resnet18")
_COMPARED_STEPS = 2
_BUDGET_S, _DUEL_BUDGET_S = 60.0, 150.0
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
        repeats: steps at most, and pairs in each duel; slow models get fewer, at least 5.

    Raises:
        ValueError: an impossible number of stages or an unknown model, before anything runs.
        WorkerError: a step failed.
    """
    check_settings("a pipeline", world_sizes, repeats)
    built = {name: build(name) for name in models}
    splits = [
        (name, _split(name, model, world_size))
        for world_size in world_sizes
        for name, model in built.items()
    ]
    return (_result(name, points, repeats) for name, points in splits)


def _split(name: str, model: nn.Sequential, world_size: int) -> tuple[int, ...]:
    if world_size > len(model):
        raise ValueError(
            f"model {name} has {len(model)} layers, and each stage needs one: use world size "
            f"{len(model)} or less, got {world_size}"
        )
    points = even_split(model, SHAPE, world_size)
    for schedule in DUELS:
        TorchPipeline(points, MICRO_BATCHES, schedule).check_ranks(world_size)
    return points


def _result(name: str, points: tuple[int, ...], repeats: int) -> PipelineResult:
    world_size, batch_size = len(points) + 1, BATCH_SIZES.get(name, BATCH_SIZE)
    options = {"world_size": world_size, "device": "cpu", "timeout_s": TIMEOUT_S}
    by_rank = run(measure, name, points, batch_size, repeats, **options).values
    seconds, duels = (slowest([rank[part] for rank in by_rank]) for part in ("seconds", "duels"))
    difference = by_rank[0]["difference"]
    return PipelineResult(name, world_size, points, batch_size, seconds, difference, duels)


def measure(
    comm: Comm, model: str, points: tuple[int, ...], batch_size: int, repeats: int
) -> dict[str, dict]:
    """On each rank: seconds by contender and in the duels, and how far all are from our GPipe."""
    model_step = ModelStep(model, batch_size)
    steps, states = {}, {}
    for name, (strategy, through) in _contenders(comm, points).items():
        steps[name] = model_step.of(strategy, through)
        for _ in range(_COMPARED_STEPS):
            steps[name]()
        states[name] = strategy.full_state()
    turns = {name: partial(timed, comm, step) for name, step in steps.items()}
    turns[ONE_DEVICE] = partial(_timed_alone, comm, _on_one_device(comm, model_step))
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


def _contenders(comm: Comm, points: tuple[int, ...]) -> dict[str, tuple[Strategy, Comm]]:
    """The strategies, each with the Comm for its messages; PyTorch's use gloo by themselves."""
    on_gloo = Comm(comm.rank, comm.world_size, comm.device, TorchTransport("gloo", comm.device))
    found: dict[str, tuple[Strategy, Comm]] = {
        OURS: (Pipeline(points, MICRO_BATCHES), comm),
        OURS_1F1B: (Pipeline(points, MICRO_BATCHES, "1f1b"), comm),
        UNPIPELINED: (ModelParallel(points), comm),
    }
    for schedule, (ours, torchs) in DUELS.items():
        found[ours] = Pipeline(points, MICRO_BATCHES, schedule), on_gloo
        found[torchs] = TorchPipeline(points, MICRO_BATCHES, schedule), comm
    return found


def _on_one_device(comm: Comm, model_step: ModelStep) -> Callable[[], None]:
    """Rank 0 trains the whole model with all cores; the others wait for it."""
    alone = Comm(0, 1, comm.device, TorchTransport("gloo", comm.device))
    train, threads = model_step.of(Single(), alone), torch.get_num_threads()

    def step() -> None:
        if comm.rank == 0:
            torch.set_num_threads(devices.num_cores())
            train()
            torch.set_num_threads(threads)

    return step


def _timed_alone(comm: Comm, step: Callable[[], None]) -> float:
    """Return only when the threads that the step has used no longer spin: others need a core."""
    seconds = timed(comm, step)
    time.sleep(_SPIN_S)
    return seconds
