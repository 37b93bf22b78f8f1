"""``labkit bench ddp`` and ``labkit bench pipeline``: steps, in turns.

Contenders take the same samples, and end with the same parameters. For DDP only the backend
changes, or whose DDP it is. Pipelines are cut at the same layers: ours in shared memory and on
gloo, ``torch.distributed.pipelining`` on gloo, and the split without micro-batches. On GPUs, NCCL
takes the place of gloo.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from labkit.builtin.ddp import TorchDDP
from labkit.builtin.pipeline import TorchPipeline
from labkit.costs.layer_profile import even_split
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.torch_transport import TorchTransport
from labkit.strategies.base import Strategy
from labkit.strategies.ddp import DDP
from labkit.strategies.model_parallel import ModelParallel, Pipeline
from labkit.training.result import largest_difference
from labkit.workload.models import build_model
from workbook.measure.record import Result
from workbook.measure.turns import DeviceOptions, Turn, on_ranks, take_turns, timed

SHAPE = (3, 32, 32)
NUM_CLASSES = 10
# The texts of the model gpt.
LENGTH = 64
VOCABULARY = 64
MICRO_BATCHES = 4
_COMPARED_STEPS = 2

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
    if model == "gpt":
        texts = torch.randint(VOCABULARY, (batch_size, LENGTH + 1), generator=generator)
        inputs = texts[:, :-1]
        targets = texts[:, 1:]
    else:
        inputs = torch.randn(batch_size, *SHAPE, generator=generator)
        targets = torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
    strategy.setup(comm, build(model), partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
    inputs = strategy.part_of(inputs).to(comm.device)
    targets = strategy.part_of(targets).to(comm.device)
    return partial(strategy.step, inputs, targets, batch_size)


def ddp(comm: Comm, model: str) -> Contenders:
    backend = dist.get_backend()
    contenders: Contenders = {f"torch on {backend}": (TorchDDP(), comm)}
    if comm.device.type == "cpu":
        contenders["torch on labkit"] = TorchDDP(backend="labkit"), comm
    contenders["labkit"] = DDP(), comm
    return contenders


def pipeline(comm: Comm, model: str) -> Contenders:
    """Pipelines with as many stages as ranks."""
    points = even_split(build(model), SHAPE, comm.world_size)
    backend = dist.get_backend()
    transport = TorchTransport(backend, comm.device)
    plain_comm = Comm(comm.rank, comm.world_size, comm.device, transport)
    contenders: Contenders = {"labkit split, not pipelined": (ModelParallel(points), comm)}
    for schedule in ("gpipe", "1f1b"):
        make = partial(Pipeline, points, MICRO_BATCHES, schedule)
        contenders[f"labkit {schedule}"] = make(), comm
        contenders[f"labkit {schedule} on {backend}"] = make(), plain_comm
        # PyTorch's send from GPU to GPU, and gloo sends host memory only.
        if comm.device.type == "cpu" or backend == "nccl":
            torchs = TorchPipeline(points, MICRO_BATCHES, schedule)
            contenders[f"torch {schedule} on {backend}"] = torchs, comm
    return contenders


def bench_steps(
    contenders: Callable[[Comm, str], Contenders],
    world_size: int,
    model: str,
    repeats: int,
    device_options: DeviceOptions,
) -> Result:
    """Time steps of some ``contenders``: forward, backward, update."""
    if contenders is ddp:
        # Few samples, so that communication is a large part of a step.
        batch_size = world_size * {"small_cnn": 32, "vgg16": 4}.get(model, 8)
    else:
        # Micro-batches must not be small: each adds its gradients to those of all parameters.
        batch_size = 64 if model == "vgg16" else 32

    def measure(comm: Comm) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Seconds of steps, and how far apart the models are after two."""
        turns: dict[str, Turn] = {}
        differences: dict[str, float] = {}
        reference_state = None
        for name, (strategy, strategy_comm) in contenders(comm, model).items():
            step = step_of(strategy, strategy_comm, model, batch_size)
            for _ in range(_COMPARED_STEPS):
                step()
            turns[name] = partial(timed, comm, step)
            state = strategy.full_state()
            reference_state = reference_state or state
            differences[name] = largest_difference(state, reference_state)
        return take_turns(turns, repeats), differences

    seconds, differences = on_ranks(measure, world_size=world_size, device_options=device_options)
    reference, *compared = seconds
    return Result(
        title=f"Step of {contenders.__name__}: {model}, {world_size} ranks, a batch of "
        f"{batch_size}, in turns; difference: of the parameters from those of {reference}",
        facts={"model": model, "world_size": world_size, "batch_size": batch_size},
        seconds={"": seconds},
        against=(reference, *(name for name in compared if name.startswith("torch"))),
        columns={"difference": {"": differences}},
    )
