"""``labkit bench pipeline``: a step of a pipeline, ours beside PyTorch's and an unpipelined split.

All contenders train copies of one model, cut at the same layers, on the same samples, in turns:
ours in shared memory and on gloo, ``torch.distributed.pipelining`` on gloo, the split without
micro-batches, and one device, for which rank 0 has all cores while the others wait. On GPUs, NCCL
takes the place of gloo; PyTorch's cannot take part where ranks share a GPU.
"""

import itertools
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from labkit import devices
from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.placement.profile import even_split
from labkit.strategies.base import Strategy
from labkit.strategies.builtin.pipeline import TorchPipeline
from labkit.strategies.model_parallel import ModelParallel
from labkit.strategies.pipeline import Pipeline
from labkit.strategies.single import Single
from labkit.training.state import largest_difference
from workbook.measure.model_step import SHAPE, ModelStep, build
from workbook.measure.record import Result
from workbook.measure.turns import (
    ANYWHERE,
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
BATCH_SIZE, MICRO_BATCHES = 32, 4
SCHEDULES = ("gpipe", "1f1b")
OURS, UNPIPELINED = "labkit gpipe", "labkit split, not pipelined"
ONE_DEVICE = "one device, all cores"
_COMPARED_STEPS, _BUDGET_S = 2, 120.0
# OpenMP's threads stay awake for 0.2 s after their last work.
_SPIN_S = 0.3


def bench_pipeline(
    world_sizes: tuple[int, ...] = (2,),
    models: tuple[str, ...] = ("vgg16", "resnet18"),
    repeats: int = 10,
    where: Where = ANYWHERE,
) -> Iterator[Result]:
    """Time pipeline steps; yield a result per model and number of stages.

    Args:
        world_sizes: stages, each at least 2.
        models: of ``labkit.workload.models``, on images of 3x32x32.
        repeats: steps at most; slow models get fewer, at least 5.
        where: the stages' devices.

    Raises:
        ValueError: an impossible number of stages, an unknown model or device, before anything
            runs.
        WorkerError: a step failed.
    """
    check_settings("a pipeline", world_sizes, repeats, where)
    splits = [
        (name, even_split(build(name), SHAPE, world_size))
        for world_size, name in itertools.product(world_sizes, models)
    ]

    def result(name: str, points: tuple[int, ...]) -> Result:
        world_size, batch_size = len(points) + 1, BATCH_SIZES.get(name, BATCH_SIZE)
        settings = {"world_size": world_size, "where": where}
        by_rank = on_ranks(measure, name, points, batch_size, repeats, **settings)
        difference, seconds = by_rank[0]["difference"], slowest([r["seconds"] for r in by_rank])
        facts = {"model": name, "world_size": world_size, "split_points": list(points)}
        return Result(
            f"Step of {name} in {world_size} stages, cut at {', '.join(map(str, points))}: batch "
            f"of {batch_size} in {MICRO_BATCHES} micro-batches, in turns; difference: of the "
            "parameters from those of our GPipe",
            facts | {"batch_size": batch_size, "micro_batches": MICRO_BATCHES},
            {"": seconds},
            (OURS, *(one for one in seconds if one.startswith("torch"))),
            columns={"difference": lambda case, contender, spread: difference.get(contender)},
        )

    return itertools.starmap(result, splits)


def measure(
    comm: Comm, model: str, points: tuple[int, ...], batch_size: int, repeats: int
) -> dict[str, dict]:
    """Measure on this rank: seconds of steps, and differences from our GPipe."""
    backend, model_step = dist.get_backend(), ModelStep(model, batch_size)
    plainly = Comm(comm.rank, comm.world_size, comm.device, TorchTransport(backend, comm.device))
    # The strategies, each with the Comm for its messages.
    found: dict[str, tuple[Strategy, Comm]] = {
        f"labkit {schedule}": (Pipeline(points, MICRO_BATCHES, schedule), comm)
        for schedule in SCHEDULES
    }
    found[UNPIPELINED] = ModelParallel(points), comm
    # PyTorch's send from GPU to GPU, and gloo sends host memory only.
    for schedule in () if comm.device.type == "cuda" and backend == "gloo" else SCHEDULES:
        ours, theirs = (
            kind(points, MICRO_BATCHES, schedule) for kind in (Pipeline, TorchPipeline)
        )
        found[f"labkit {schedule} on {backend}"] = ours, plainly
        # PyTorch's find their process group themselves.
        found[f"torch {schedule} on {backend}"] = theirs, comm
    turns, states = {}, {}
    for name, (strategy, through) in found.items():
        step = model_step.of(strategy, through)
        for _ in range(_COMPARED_STEPS):
            step()
        turns[name], states[name] = partial(timed, comm, step), strategy.full_state()
    alone = Comm(0, 1, comm.device, TorchTransport(backend, comm.device))
    train, threads = model_step.of(Single(), alone), torch.get_num_threads()

    def train_alone() -> None:
        if comm.rank == 0:
            torch.set_num_threads(devices.num_cores())
            train()
            torch.set_num_threads(threads)

    def turn_alone() -> float:
        seconds = timed(comm, train_alone)
        # Wait until the threads of the step no longer spin: the next turn needs the cores.
        time.sleep(_SPIN_S)
        return seconds

    return {
        "difference": {name: largest_difference(s, states[OURS]) for name, s in states.items()},
        "seconds": take_turns(comm, turns | {ONE_DEVICE: turn_alone}, repeats, _BUDGET_S),
    }
