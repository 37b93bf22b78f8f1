"""``labkit bench pipeline``: a step of a pipeline, ours beside PyTorch's and an unpipelined split.

All contenders train copies of one model, cut at the same layers, on the same samples, in one run:
ours in shared memory and on gloo, ``torch.distributed.pipelining`` on gloo, the split without
micro-batches, and one device, for which rank 0 has all cores while the others wait. On GPUs, NCCL
takes the place of gloo; PyTorch's cannot take part where ranks share a GPU. A duel per
schedule follows: our pipeline and PyTorch's take turns on the same transport, without the other
contenders, because it takes many pairs to show a difference of a few percent.
"""

import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labkit import devices as machine
from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.placement.profile import even_split
from labkit.strategies.base import Strategy
from labkit.strategies.builtin.pipeline import TorchPipeline
from labkit.strategies.model_parallel import ModelParallel, Pipeline
from labkit.strategies.on_shares import Single
from labkit.training.result import largest_difference
from workbook.measure.model_step import SHAPE, ModelStep, build
from workbook.measure.record import Result
from workbook.measure.turns import (
    Turn,
    Where,
    check_settings,
    on_ranks,
    slowest,
    take_turns,
    timed,
)

# Micro-batches must not be small: each one adds its gradients to those of all parameters, and
# vgg16 has the most parameters.
BATCH_SIZES = {"vgg16": 64}
BATCH_SIZE = 32
MODELS = ("vgg16", "resnet18")
MICRO_BATCHES = 4
OURS, UNPIPELINED = "labkit gpipe", "labkit split, not pipelined"
ONE_DEVICE = "one device, all cores"
SCHEDULES = ("gpipe", "1f1b")
_COMPARED_STEPS = 2
_BUDGET_S, _DUEL_BUDGET_S = 60.0, 150.0
# OpenMP's threads stay awake for 0.2 s after their last work.
_SPIN_S = 0.3


def bench_pipeline(
    world_sizes: tuple[int, ...] = (2,),
    models: tuple[str, ...] = MODELS,
    repeats: int = 10,
    device: str = "auto",
    devices: tuple[str, ...] | None = None,
) -> Iterator[Result]:
    """Time pipeline steps; yield a result per model and number of stages, and one per duel.

    Args:
        world_sizes: stages, each at least 2.
        models: of ``labkit.workload.models``, on images of 3x32x32.
        repeats: steps at most, and pairs in each duel; slow models get fewer, at least 5.
        device, devices: see ``labkit.run``.

    Raises:
        ValueError: an impossible number of stages, an unknown model or device, before anything
            runs.
        WorkerError: a step failed.
    """
    where = {"device": device, "devices": devices}
    check_settings("a pipeline", world_sizes, repeats, where)
    built = {name: build(name) for name in models}
    splits = [
        (name, _split(name, model, world_size))
        for world_size in world_sizes
        for name, model in built.items()
    ]
    return (one for name, points in splits for one in _results(name, points, repeats, where))


def _split(name: str, model: nn.Sequential, world_size: int) -> tuple[int, ...]:
    if world_size > len(model):
        raise ValueError(
            f"model {name} has {len(model)} layers, and each stage needs one: use world size "
            f"{len(model)} or less, got {world_size}"
        )
    points = even_split(model, SHAPE, world_size)
    for schedule in SCHEDULES:
        TorchPipeline(points, MICRO_BATCHES, schedule).check_ranks(world_size)
    return points


def _results(name: str, points: tuple[int, ...], repeats: int, where: Where) -> Iterator[Result]:
    world_size, batch_size = len(points) + 1, BATCH_SIZES.get(name, BATCH_SIZE)
    settings = {"world_size": world_size, "where": where}
    by_rank = on_ranks(measure, name, points, batch_size, repeats, **settings)
    difference = by_rank[0]["difference"]
    facts = {"model": name, "world_size": world_size, "split_points": list(points)}
    facts |= {"batch_size": batch_size, "micro_batches": MICRO_BATCHES}
    what = f"Step of {name} in {world_size} stages, cut at {', '.join(map(str, points))}"
    what += f": batch of {batch_size} in {MICRO_BATCHES} micro-batches"
    yield Result(
        f"{what}, in turns; difference: of the parameters from those of our GPipe",
        facts,
        {"": slowest([rank["seconds"] for rank in by_rank])},
        (OURS,),
        columns={"difference": lambda case, contender, spread: difference.get(contender)},
    )
    for schedule in by_rank[0]["duels"]:
        seconds = slowest([rank["duels"][schedule] for rank in by_rank])
        title = f"{what}, {schedule} against {schedule}"
        yield Result(title, facts | {"duel": schedule}, {"": seconds}, tuple(seconds)[1:])


def measure(
    comm: Comm, model: str, points: tuple[int, ...], batch_size: int, repeats: int
) -> dict[str, dict]:
    """Measure on this rank: seconds of steps and duels, and differences from our GPipe."""
    model_step = ModelStep(model, batch_size)
    steps, states = {}, {}
    found, pairs = _contenders(comm, points)
    for name, (strategy, through) in found.items():
        steps[name] = model_step.of(strategy, through)
        for _ in range(_COMPARED_STEPS):
            steps[name]()
        states[name] = strategy.full_state()
    turns = {name: partial(timed, comm, step) for name, step in steps.items()}
    return {
        "difference": {name: largest_difference(s, states[OURS]) for name, s in states.items()},
        "seconds": take_turns(
            comm, turns | {ONE_DEVICE: _turn_alone(comm, model_step)}, repeats, _BUDGET_S
        ),
        "duels": {
            schedule: take_turns(comm, {n: turns[n] for n in pair}, repeats, _DUEL_BUDGET_S)
            for schedule, pair in pairs.items()
        },
    }


def _contenders(
    comm: Comm, points: tuple[int, ...]
) -> tuple[dict[str, tuple[Strategy, Comm]], dict[str, tuple[str, str]]]:
    """The strategies, each with the Comm for its messages, and by schedule the pair of a duel."""
    backend = dist.get_backend()
    plainly = Comm(comm.rank, comm.world_size, comm.device, TorchTransport(backend, comm.device))
    found: dict[str, tuple[Strategy, Comm]] = {
        f"labkit {schedule}": (Pipeline(points, MICRO_BATCHES, schedule), comm)
        for schedule in SCHEDULES
    }
    found[UNPIPELINED] = ModelParallel(points), comm
    if comm.device.type == "cuda" and backend == "gloo":
        # PyTorch's send from GPU to GPU, and gloo sends host memory only.
        return found, {}
    pairs = {s: (f"labkit {s} on {backend}", f"torch {s} on {backend}") for s in SCHEDULES}
    for schedule, (ours, torchs) in pairs.items():
        found[ours] = Pipeline(points, MICRO_BATCHES, schedule), plainly
        # PyTorch's find their process group themselves.
        found[torchs] = TorchPipeline(points, MICRO_BATCHES, schedule), comm
    return found, pairs


def _turn_alone(comm: Comm, model_step: ModelStep) -> Turn:
    """Rank 0 trains the whole model with all cores; the others wait for it."""
    alone = Comm(0, 1, comm.device, TorchTransport(dist.get_backend(), comm.device))
    train, threads = model_step.of(Single(), alone), torch.get_num_threads()

    def step() -> None:
        if comm.rank == 0:
            torch.set_num_threads(machine.num_cores())
            train()
            torch.set_num_threads(threads)

    def turn() -> float:
        seconds = timed(comm, step)
        # Wait until the threads of the step no longer spin: the next turn needs the cores.
        time.sleep(_SPIN_S)
        return seconds

    return turn
