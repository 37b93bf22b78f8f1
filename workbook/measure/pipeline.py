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
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

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
from labkit.units import format_count, format_number, format_seconds
from workbook.measure.model_step import SHAPE, ModelStep, build
from workbook.measure.record import Result
from workbook.measure.spread import Spread, ratios, rounded, step_record, table
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
OURS, OURS_1F1B = "labkit gpipe", "labkit 1f1b"
UNPIPELINED, ONE_DEVICE = "labkit split, not pipelined", "one device, all cores"
SCHEDULES = ("gpipe", "1f1b")
# By schedule, ours and PyTorch's, on the transport that PyTorch's uses on the CPU.
DUELS = {name: (f"labkit {name} on gloo", f"torch {name} on gloo") for name in SCHEDULES}
_COMPARED_STEPS = 2
_BUDGET_S, _DUEL_BUDGET_S = 60.0, 150.0
# OpenMP's threads stay awake for 0.2 s after their last work.
_SPIN_S = 0.3


@dataclass(frozen=True)
class PipelineResult(Result):
    """One model, cut evenly, under every contender.

    Attributes:
        seconds: by contender, the seconds of each step, from the latest start to the latest end
            of a rank.
        difference: by contender, the largest relative difference of its parameters from those of
            our GPipe after some steps; None for one device, which rank 0 alone trains.
        duels: by schedule, the seconds of our pipeline and of PyTorch's, by name, which took
            turns without the others; empty where PyTorch's cannot run.
    """

    model: str
    world_size: int
    split_points: tuple[int, ...]
    batch_size: int
    seconds: dict[str, list[float]]
    difference: dict[str, float | None]
    duels: dict[str, dict[str, list[float]]]

    def times_torch(self, schedule: str) -> list[float]:
        """Our step / PyTorch's on the same transport, pair by pair: above 1 PyTorch is faster."""
        return ratios(*self.duels[schedule].values())

    def against_ours(self, other: str) -> list[float]:
        """The other's step / our GPipe's, repeat by repeat: above 1 ours is faster."""
        return ratios(self.seconds[other], self.seconds[OURS])

    def __str__(self) -> str:
        steps = format_count(len(self.seconds[OURS]), "step")
        title = (
            f"Step of {self.model} in {self.world_size} stages, cut at "
            f"{', '.join(map(str, self.split_points))}: batch of {self.batch_size} in "
            f"{MICRO_BATCHES} micro-batches,\nmedian of {steps} (quartiles), in turns"
        )
        rows = [
            [
                name,
                Spread.of(seconds).text(format_seconds),
                Spread.of(self.against_ours(name)).text(format_number),
                "" if (difference := self.difference[name]) is None else f"{difference:.1g}",
            ]
            for name, seconds in self.seconds.items()
        ]
        columns = table(["", "step", f"/ {OURS}", "difference"], rows)
        return f"{title}\n\n{columns}\n\n{self._duels_text()}\n"

    def _duels_text(self) -> str:
        found = {schedule: self.times_torch(schedule) for schedule in self.duels}
        return "\n".join(
            f"{' / '.join(self.duels[schedule])}: {Spread.of(pairs).text('{:.3f}'.format)}, "
            f"{format_count(len(pairs), 'pair')}"
            for schedule, pairs in found.items()
        )

    def record(self) -> dict[str, list[dict]]:
        """``rows``, one per contender, and ``duels``, one per schedule."""
        common = self.plain() | {"micro_batches": MICRO_BATCHES}
        common["split_points"] = list(self.split_points)
        rows = [
            {
                **common,
                "contender": name,
                **step_record(seconds, {OURS: self.against_ours(name)}),
                "difference": self.difference[name],
            }
            for name, seconds in self.seconds.items()
        ]
        duels = [
            {
                **common,
                "schedule": schedule,
                "seconds": {name: rounded(seconds) for name, seconds in pair.items()},
                "labkit_to_torch": asdict(Spread.of(self.times_torch(schedule))),
            }
            for schedule, pair in self.duels.items()
        ]
        return {"rows": rows, "duels": duels}


def bench_pipeline(
    world_sizes: tuple[int, ...] = (2,),
    models: tuple[str, ...] = MODELS,
    repeats: int = 10,
    device: str = "auto",
    devices: tuple[str, ...] | None = None,
) -> Iterator[PipelineResult]:
    """Time pipeline steps; yield one result per model and number of stages.

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
    check_settings("a pipeline", world_sizes, repeats)
    where = Where(device, devices)
    for world_size in world_sizes:
        where.plan(world_size)
    built = {name: build(name) for name in models}
    splits = [
        (name, _split(name, model, world_size))
        for world_size in world_sizes
        for name, model in built.items()
    ]
    return (_result(name, points, repeats, where) for name, points in splits)


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


def _result(name: str, points: tuple[int, ...], repeats: int, where: Where) -> PipelineResult:
    world_size, batch_size = len(points) + 1, BATCH_SIZES.get(name, BATCH_SIZE)
    settings = {"world_size": world_size, "where": where}
    by_rank = on_ranks(measure, name, points, batch_size, repeats, **settings)
    seconds, duels = (slowest([rank[part] for rank in by_rank]) for part in ("seconds", "duels"))
    difference = by_rank[0]["difference"]
    return PipelineResult(name, world_size, points, batch_size, seconds, difference, duels)


def measure(
    comm: Comm, model: str, points: tuple[int, ...], batch_size: int, repeats: int
) -> dict[str, dict]:
    """Measure on this rank: seconds of steps and duels, and differences from our GPipe."""
    model_step = ModelStep(model, batch_size)
    steps, states = {}, {}
    for name, (strategy, through) in _contenders(comm, points).items():
        steps[name] = model_step.of(strategy, through)
        for _ in range(_COMPARED_STEPS):
            steps[name]()
        states[name] = strategy.full_state()
    turns = {name: partial(timed, comm, step) for name, step in steps.items()}
    turns[ONE_DEVICE] = _turn_alone(comm, model_step)
    difference = {name: largest_difference(s, states[OURS]) for name, s in states.items()}
    pairs = {schedule: duel_names(schedule, comm.device.type) for schedule in SCHEDULES}
    duels = {
        schedule: {name: turns[name] for name in pair}
        for schedule, pair in pairs.items()
        if set(pair) <= turns.keys()
    }
    return {
        "seconds": take_turns(comm, turns, repeats, _BUDGET_S),
        "difference": difference | {ONE_DEVICE: None},
        "duels": {
            schedule: take_turns(comm, pair, repeats, _DUEL_BUDGET_S)
            for schedule, pair in duels.items()
        },
    }


def duel_names(schedule: str, device_type: str = "cpu") -> tuple[str, str]:
    """The names of our pipeline and of PyTorch's, on the transport that PyTorch's uses."""
    ours, torchs = DUELS[schedule]
    if device_type == "cuda":
        ours, torchs = ours.replace("gloo", "NCCL"), torchs.replace("gloo", "NCCL")
    return ours, torchs


def _contenders(comm: Comm, points: tuple[int, ...]) -> dict[str, tuple[Strategy, Comm]]:
    """The strategies, each with the Comm for its messages; PyTorch's find theirs themselves."""
    backend = dist.get_backend()
    plainly = Comm(comm.rank, comm.world_size, comm.device, TorchTransport(backend, comm.device))
    found: dict[str, tuple[Strategy, Comm]] = {
        OURS: (Pipeline(points, MICRO_BATCHES), comm),
        OURS_1F1B: (Pipeline(points, MICRO_BATCHES, "1f1b"), comm),
        UNPIPELINED: (ModelParallel(points), comm),
    }
    if comm.device.type == "cuda" and backend == "gloo":
        # PyTorch's send from GPU to GPU, and gloo sends host memory only.
        return found
    for schedule in SCHEDULES:
        ours, torchs = duel_names(schedule, comm.device.type)
        found[ours] = Pipeline(points, MICRO_BATCHES, schedule), plainly
        found[torchs] = TorchPipeline(points, MICRO_BATCHES, schedule), comm
    return found


def _turn_alone(comm: Comm, model_step: ModelStep) -> Turn:
    """Rank 0 trains the whole model with all cores; the others wait for it."""
    alone = Comm(0, 1, comm.device, TorchTransport(dist.get_backend(), comm.device))
    train, threads = model_step.of(Single(), alone), torch.get_num_threads()

    def step() -> None:
        if comm.rank == 0:
            torch.set_num_threads(devices.num_cores())
            train()
            torch.set_num_threads(threads)

    def turn() -> float:
        seconds = timed(comm, step)
        # Wait until the threads of the step no longer spin: the next turn needs the cores.
        time.sleep(_SPIN_S)
        return seconds

    return turn
