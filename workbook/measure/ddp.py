"""``labkit bench ddp``: a step of PyTorch's DDP on several backends, and of our own DDP.

The same model is trained on the same samples by PyTorch's DistributedDataParallel, of which only
the backend changes, and by ``labkit.strategies.ddp.BucketedDDP``.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.comm.comm import Comm
from labkit.strategies.ddp import BucketedDDP
from labkit.training.result import checksum, largest_difference
from labkit.units import check_choice
from workbook.measure.model_step import LEARNING_RATE, NUM_CLASSES, SHAPE, build
from workbook.measure.record import Result
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
OURS, REFERENCE = "labkit ddp", "gloo"
# Samples per rank and step, by model: few, so that communication is a large part of a step.
BATCH_SIZES = {"small_cnn": 32, "resnet18": 8, "vgg16": 4}


def bench_ddp(
    world_sizes: tuple[int, ...] = (2,),
    models: tuple[str, ...] = tuple(BATCH_SIZES),
    repeats: int = 30,
    device: str = "auto",
    devices: tuple[str, ...] | None = None,
) -> Iterator[Result]:
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
    where = {"device": device, "devices": devices}
    check_settings("DDP", world_sizes, repeats, where)
    for model in models:
        check_choice("model", model, BATCH_SIZES)
    pairs = itertools.product(world_sizes, models)
    return (_result(model, ranks, repeats, where) for ranks, model in pairs)


def _result(model: str, world_size: int, repeats: int, where: Where) -> Result:
    by_rank = on_ranks(measure, model, repeats, world_size=world_size, where=where)
    mine = by_rank[0]

    def error(case: Any, name: str, spread: Any) -> float:
        return max(rank["error"][name] for rank in by_rank)

    def replicas(case: Any, name: str, spread: Any) -> str:
        digests = {rank["digest"][name] for rank in by_rank}
        return "equal" if len(digests) == 1 else "DIFFERENT"

    facts = {"model": model, "num_parameters": mine["num_parameters"], "world_size": world_size}
    return Result(
        f"DDP step of {model} ({mine['num_parameters'] / 1e6:.3g} million parameters), "
        f"{world_size} ranks, {BATCH_SIZES[model]} samples per rank, in turns; the error of the "
        "gradients is relative to gloo's",
        facts | {"batch_size": BATCH_SIZES[model]},
        {"": slowest([rank["seconds"] for rank in by_rank])},
        (REFERENCE,),
        columns={"gradient_error": error, "replicas": replicas},
    )


def measure(comm: Comm, model: str, repeats: int) -> dict[str, Any]:
    """Measure on this rank, by backend: seconds, gradient error, digest of the parameters.

    The error is the largest difference from gloo's gradients, over all parameters and a few steps
    from equal parameters, relative to a parameter's largest gradient.
    """
    torch.manual_seed(0)
    base = _build(model).to(comm.device)
    with process_groups(comm) as groups:
        wrapped: dict[str, nn.Module] = {
            name: DistributedDataParallel(copy.deepcopy(base), process_group=group)
            for name, group in groups.items()
        }
        wrapped[OURS] = BucketedDDP(comm, copy.deepcopy(base))
        steps = {
            name: _stepper(comm, wrapper, BATCH_SIZES[model]) for name, wrapper in wrapped.items()
        }
        error = dict.fromkeys(wrapped, 0.0)
        for _ in range(_COMPARED_STEPS):
            start = copy.deepcopy(wrapped[REFERENCE].state_dict())
            for name, one in wrapped.items():
                one.load_state_dict(start)
                steps[name]()
                apart = largest_difference(_gradients(one), _gradients(wrapped[REFERENCE]))
                error[name] = max(error[name], apart)
        return {
            "num_parameters": sum(parameter.numel() for parameter in base.parameters()),
            "error": error,
            "seconds": take_turns(comm, steps, repeats, _BUDGET_S),
            # Buffers may differ by rank and are left out.
            "digest": {
                name: checksum({key: p.detach().cpu() for key, p in one.named_parameters()})
                for name, one in wrapped.items()
            },
        }


def _build(name: str) -> nn.Module:
    """Our small CNN, or torchvision's model with its full number of parameters."""
    if name == "small_cnn":
        return build(name)
    from torchvision import models

    model = getattr(models, name)(num_classes=NUM_CLASSES)
    for module in model.modules():
        # With dropout, each replica would draw other random numbers and get other gradients.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _stepper(comm: Comm, model: nn.Module, batch_size: int) -> Callable[[], float]:
    """A step on this rank's next samples, the same for every DDP; returns its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(comm.rank)

    def step() -> float:
        images = torch.randn(batch_size, *SHAPE, generator=generator).to(comm.device)
        classes = torch.randint(NUM_CLASSES, (batch_size,), generator=generator).to(comm.device)

        def train() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), classes).backward()
            optimizer.step()

        return timed(comm, train)

    return step


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    # By number, since each DDP adds its own prefix to the names.
    grads = {str(at): parameter.grad for at, parameter in enumerate(model.parameters())}
    return {name: grad for name, grad in grads.items() if grad is not None}
