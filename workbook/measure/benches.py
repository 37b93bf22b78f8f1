"""``labkit bench launch``, ``ddp``, ``pipeline`` and ``checkpoint``.

Each is a dict of contenders that take turns. In ``ddp`` and ``pipeline`` they train copies of one
model on the same samples, and must end with the same parameters. For DDP only the backend changes,
or whose DDP it is. Pipelines are cut at the same layers: ours in shared memory and on gloo,
``torch.distributed.pipelining`` on gloo, and the split without micro-batches. On GPUs, NCCL takes
the place of gloo.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import save_file

from labkit.collectives import ring_all_reduce
from labkit.comm.comm import Comm
from labkit.comm.shared_memory import loopback
from labkit.comm.torch_transport import TorchTransport
from labkit.devices import Plan, plan
from labkit.placement.profile import even_split
from labkit.runtime.launch import run
from labkit.strategies.base import Strategy
from labkit.strategies.builtin.ddp import TorchDDP
from labkit.strategies.builtin.pipeline import TorchPipeline
from labkit.strategies.ddp import DDP
from labkit.strategies.model_parallel import ModelParallel, Pipeline
from labkit.training import checkpoint
from labkit.training.checkpoint import Facts
from labkit.training.result import largest_difference
from labkit.units import format_bytes
from labkit.workload.models import build_model
from workbook.measure.record import Result
from workbook.measure.turns import Turn, Where, on_ranks, repeat_turns, take_turns, timed

SHAPE, NUM_CLASSES = (3, 32, 32), 10
MICRO_BATCHES, SCHEDULES = 4, ("gpipe", "1f1b")
_COMPARED_STEPS = 2
SPAWN, PLAIN_FILE = "torch.multiprocessing.spawn", "safetensors alone"

# The strategies by name, each with the Comm for its messages; the first is the reference.
Contenders = dict[str, tuple[Strategy, Comm]]


def bench_launch(world_size: int, repeats: int, where: Where) -> Iterator[Result]:
    """Time a small run, by ``labkit.run`` and by ``torch.multiprocessing.spawn``.

    Both start the ranks, join them to a group (NCCL where each rank has a GPU, else gloo), sum one
    number over them, and end them. The start of our forkserver, which only the first run of a
    program waits for, is left out.
    """

    def sum_one(comm: Comm) -> float:
        return ring_all_reduce(comm, torch.ones(1, device=comm.device)).item()

    def ours() -> None:
        result = run(sum_one, world_size=world_size, **where)
        assert result.values == [float(world_size)] * world_size

    def theirs() -> None:
        with tempfile.TemporaryDirectory(prefix="labkit-spawn-") as folder:
            arguments = world_size, f"{folder}/store", plan(world_size, **where)
            torch.multiprocessing.spawn(_spawned_rank, arguments, world_size)

    def seconds_of(launch: Callable[[], None]) -> float:
        start_s = time.perf_counter()
        launch()
        return time.perf_counter() - start_s

    run(sum_one, world_size=1, **where)
    turns = {"labkit.run": partial(seconds_of, ours), SPAWN: partial(seconds_of, theirs)}
    seconds = {"": repeat_turns(turns, repeats)}
    yield Result(f"A run of {world_size} ranks", {"world_size": world_size}, seconds, (SPAWN,))


def _spawned_rank(rank: int, world_size: int, path: str, chosen: Plan) -> None:
    # A store in a private file: PyTorch's TCP store would listen on every interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    store = dist.FileStore(path, world_size)
    device = torch.device(chosen.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(chosen.backend, store=store, rank=rank, world_size=world_size)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == world_size
    dist.destroy_process_group()


def build(model: str) -> torch.nn.Sequential:
    """One of ``labkit.workload.models`` for images of 3x32x32, the same on every rank."""
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


def bench_checkpoint(world_size: int, model: str, repeats: int, where: Where) -> Iterator[Result]:
    """For how long a checkpoint of all ranks stops the training, and a plain file by rank 0."""
    with tempfile.TemporaryDirectory(prefix="labkit-checkpoints-") as folder:

        def measure(comm: Comm) -> tuple[dict[str, list[float]], int]:
            """Seconds, and the bytes of the tensors that our DDP trains with."""
            strategy, numbers = DDP(), itertools.count(1)
            step_of(strategy, comm, model, batch_size=32 * comm.world_size)()
            state = {n: one for n, one in strategy.state().items() if not n.startswith("own/")}
            state = state if comm.rank == 0 else {"random": torch.get_rng_state()}
            # It refuses tensors that share memory.
            alone = {name: tensor.clone().cpu() for name, tensor in state.items()}

            def save() -> None:
                path = checkpoint.step_path(folder, step := next(numbers))
                checkpoint.save(comm, path, Facts(0, step, [], {}), state)

            def plain() -> None:
                if comm.rank == 0:
                    # As with checkpoints, an old one goes.
                    path = Path(folder, "plain.safetensors")
                    path.unlink(missing_ok=True)
                    save_file(alone, path)

            actions = {"checkpoint": save, PLAIN_FILE: plain}
            turns = {name: partial(timed, comm, action) for name, action in actions.items()}
            return take_turns(turns, repeats), sum(one.nbytes for one in state.values())

        seconds, num_bytes = on_ranks(measure, world_size=world_size, where=where)
    yield Result(
        f"Checkpoints of {model} ({format_bytes(num_bytes)}), {world_size} ranks, in turns",
        {"model": model, "world_size": world_size, "num_bytes": num_bytes},
        {"": seconds},
        (PLAIN_FILE,),
    )
