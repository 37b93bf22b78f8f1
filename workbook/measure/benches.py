"""``labkit bench ddp`` and ``pipeline``: contenders in turns.

They take the same samples, and end with the same parameters. For DDP only the backend changes, or
whose DDP it is. Pipelines are cut at the same layers: ours in shared memory and on gloo,
``torch.distributed.pipelining`` on gloo, and the split without micro-batches. On GPUs, NCCL takes
the place of gloo.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.placement.profile import even_split
from labkit.strategies.base import Strategy
from labkit.strategies.builtin.ddp import TorchDDP
from labkit.strategies.builtin.pipeline import TorchPipeline
from labkit.strategies.ddp import DDP
from labkit.strategies.model_parallel import ModelParallel, Pipeline
from labkit.training.result import largest_difference
from labkit.workload.models import build_model
from workbook.measure.record import Result
from workbook.measure.turns import Turn, Where, on_ranks, take_turns, timed

SHAPE, NUM_CLASSES = (3, 32, 32), 10
MICRO_BATCHES, SCHEDULES = 4, ("gpipe", "1f1b")
_COMPARED_STEPS = 2

# The strategies by name, each with the Comm for its messages; the first is the reference.
Contenders = dict[str, tuple[Strategy, Comm]]


def build(model: str) -> torch.nn.Sequential:
    """A model for images of 3x32x32, the same on every rank."""
    return build_model(model, num_classes=NUM_CLASSES, input_shape=SHAPE, seed=0)


def step_of(
    strategy: Strategy, comm: Comm, model: str, batch_size: int
) -> Callable[[], torch.Tensor]:
    """Set a strategy up to train a model on random samples, the same by rank: its step."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(batch_size, *SHAPE, generator=generator)
    classes = torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
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
