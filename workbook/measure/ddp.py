"""``labkit bench ddp``: a step of PyTorch's DDP on several backends, and of our own DDP.

The same model is trained on the same samples by PyTorch's DistributedDataParallel, of which only
the backend changes, and by ``labkit.strategies.ddp.BucketedDDP``.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.comm.comm import Comm
from labkit.strategies.ddp import BucketedDDP
from labkit.training.state import checksum, largest_difference
from labkit.units import check_choice, format_number, format_seconds
from labkit.workload.models import import_torchvision
from workbook.measure.model_step import LEARNING_RATE, NUM_CLASSES, SHAPE, build
from workbook.measure.record import Result
from workbook.measure.spread import Spread, ratios, step_record, table
from workbook.measure.turns import (
    Where,
    check_settings,
    on_ranks,
    process_groups,
    slowest,
    take_turns,
    timed,
)

# Steps in which the gradients are compared, before any step is timed.
_COMPARED_STEPS = 2
_BUDGET_S = 30.0
# Our DDP, which has no backend, is listed among the backends of PyTorch's DDP under this name.
OURS = "labkit ddp"
# Samples per rank and step, by model: few, so that communication is a large part of a step.
BATCH_SIZES = {"small_cnn": 32, "resnet18": 8, "vgg16": 4}


@dataclass(frozen=True)
class DdpResult(Result):
    """One model on every backend of PyTorch's DDP, and under our own ("labkit ddp").

    Attributes:
        batch_size: samples per rank and step.
        seconds: by backend, the seconds of each step, from the latest start to the latest end of
            a rank.
        gradient_error: by backend, over all parameters the largest difference from gloo's
            gradient, relative to the parameter's largest gradient.
        replicas_equal: by backend, whether all ranks hold the same parameters to the bit at the
            end.
    """

    model: str
    num_parameters: int
    world_size: int
    device: str
    batch_size: int
    seconds: dict[str, list[float]]
    gradient_error: dict[str, float]
    replicas_equal: dict[str, bool]

    def times_gloo(self, backend: str) -> list[float]:
        """gloo's step / this backend's, repeat by repeat: above 1, the backend is faster."""
        return ratios(self.seconds["gloo"], self.seconds[backend])

    def __str__(self) -> str:
        repeats = len(self.seconds["gloo"])
        title = (
            f"DDP step of {self.model} ({self.num_parameters / 1e6:.3g} million parameters), "
            f"{self.world_size} ranks on {self.device}, {self.batch_size} samples per rank:\n"
            f"median of {repeats} steps (quartiles), backends in turns"
        )
        header = ["backend", "step", "against gloo", "gradients' error", "replicas"]
        rows = [
            [
                name,
                Spread.of(seconds).text(format_seconds),
                Spread.of(self.times_gloo(name)).text(format_number),
                f"{self.gradient_error[name]:.2g}",
                "equal" if self.replicas_equal[name] else "DIFFERENT",
            ]
            for name, seconds in self.seconds.items()
        ]
        return f"{title}\n\n{table(header, rows)}\n"

    def record(self) -> dict[str, list[dict]]:
        """``rows``, one per backend."""
        rows = [
            {
                **self.plain(),
                "backend": name,
                **step_record(seconds, {"gloo": self.times_gloo(name)}),
                "gradient_error": self.gradient_error[name],
                "replicas_equal": self.replicas_equal[name],
            }
            for name, seconds in self.seconds.items()
        ]
        return {"rows": rows}


def bench_ddp(
    world_sizes: tuple[int, ...] = (2,),
    models: tuple[str, ...] = tuple(BATCH_SIZES),
    repeats: int = 30,
    device: str = "auto",
    devices: tuple[str, ...] | None = None,
) -> Iterator[DdpResult]:
    """Time steps of DDP (forward, backward, update), one result for each model and world size.

    Args:
        world_sizes: of the runs, each at least 2.
        models: names out of ``BATCH_SIZES``; vgg16 has 134 million parameters and takes about
            4 GB of memory per rank.
        repeats: steps at most; slow models get fewer, at least 5.
        device, devices: see ``labkit.run``; on ``cuda`` NCCL takes part where each rank has a GPU.

    Raises:
        ValueError: an unknown model or an impossible world size, before anything runs.
        WorkerError: a step failed.
    """
    check_settings("DDP", world_sizes, repeats)
    for model in models:
        check_choice("model", model, BATCH_SIZES)
    where = Where(device, devices)
    kind = where.kind
    run = partial(on_ranks, measure, where=where)
    return (
        put_together(run(model, repeats, world_size=ranks), model, kind)
        for ranks, model in itertools.product(world_sizes, models)
    )


def put_together(by_rank: list[dict[str, Any]], model: str, device: str) -> DdpResult:
    """Combine what ``measure`` returned on each rank into one result."""
    mine = by_rank[0]
    return DdpResult(
        model,
        mine["num_parameters"],
        len(by_rank),
        device,
        BATCH_SIZES[model],
        slowest([rank["seconds"] for rank in by_rank]),
        {name: max(rank["error"][name] for rank in by_rank) for name in mine["error"]},
        {name: len({rank["digest"][name] for rank in by_rank}) == 1 for name in mine["digest"]},
    )


def measure(comm: Comm, model: str, repeats: int) -> dict[str, Any]:
    """Measure on this rank, by backend: seconds, gradient error, digest of the parameters."""
    torch.manual_seed(0)
    base = _build(model).to(comm.device)
    with process_groups(comm) as groups:
        wrapped: dict[str, nn.Module] = {
            name: DistributedDataParallel(copy.deepcopy(base), process_group=group)
            for name, group in groups.items()
        }
        wrapped[OURS] = BucketedDDP(comm, copy.deepcopy(base))
        replicas = {
            name: Replica(comm, wrapper, BATCH_SIZES[model]) for name, wrapper in wrapped.items()
        }
        error = compare_gradients(replicas)
        turns = {name: replica.timed_step for name, replica in replicas.items()}
        return {
            "num_parameters": sum(parameter.numel() for parameter in base.parameters()),
            "error": error,
            "seconds": take_turns(comm, turns, repeats, _BUDGET_S),
            "digest": {name: digest(replica.model) for name, replica in replicas.items()},
        }


def _build(name: str) -> nn.Module:
    """Our small CNN, or torchvision's model with its full number of parameters."""
    if name == "small_cnn":
        return build(name)
    model = getattr(import_torchvision().models, name)(num_classes=NUM_CLASSES)
    for module in model.modules():
        # With dropout, each replica would draw other random numbers and get other gradients.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


class Replica:
    """A model under one DDP. Each rank draws its own samples, the same for every DDP."""

    def __init__(self, comm: Comm, model: nn.Module, batch_size: int):
        self.comm = comm
        self.batch_size = batch_size
        self.model = model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.generator = torch.Generator().manual_seed(comm.rank)

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next samples [n, 3, 32, 32] and their classes [n]."""
        images = torch.randn(self.batch_size, *SHAPE, generator=self.generator)
        classes = torch.randint(NUM_CLASSES, (self.batch_size,), generator=self.generator)
        return images.to(self.comm.device), classes.to(self.comm.device)

    def step(self, images: Tensor, classes: Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(images), classes).backward()
        self.optimizer.step()

    def timed_step(self) -> float:
        samples = self.draw()
        return timed(self.comm, lambda: self.step(*samples))


def digest(model: nn.Module) -> str:
    """A checksum of the parameters to the bit; buffers may differ by rank and are left out."""
    return checksum({name: p.detach().cpu() for name, p in model.named_parameters()})


def compare_gradients(replicas: dict[str, Replica]) -> dict[str, float]:
    """By backend, the largest difference of the gradients from gloo's in a few steps.

    In each step, all replicas start from the same parameters.
    """
    reference = replicas["gloo"]
    error = dict.fromkeys(replicas, 0.0)
    for _ in range(_COMPARED_STEPS):
        start = copy.deepcopy(reference.model.state_dict())
        for name, replica in replicas.items():
            replica.model.load_state_dict(start)
            replica.step(*replica.draw())
            error[name] = max(error[name], gradient_error(replica.model, reference.model))
    return error


def gradient_error(model: nn.Module, reference: nn.Module) -> float:
    """Over all parameters, the largest |difference| relative to the largest |gradient|."""
    return largest_difference(_gradients(model), _gradients(reference))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    # By number, since each DDP adds its own prefix to the names.
    grads = {str(at): parameter.grad for at, parameter in enumerate(model.parameters())}
    return {name: grad for name, grad in grads.items() if grad is not None}
