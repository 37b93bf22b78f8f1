"""``labkit bench ddp``: a step of PyTorch's DDP on several backends, and of our own DDP.

The same model is trained on the same samples by PyTorch's DistributedDataParallel, of which only
the backend changes, and by ``labkit.strategies.ddp.BucketedDDP``.
"""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.comm.comm import Comm
from labkit.strategies.ddp import BucketedDDP
from labkit.training.state import checksum, largest_difference
from labkit.units import check_choice
from workbook.measure.model_step import LEARNING_RATE, ModelStep
from workbook.measure.record import Result
from workbook.measure.turns import (
    ANYWHERE,
    Turn,
    Where,
    check_settings,
    on_ranks,
    process_groups,
    slowest,
    take_turns,
    timed,
)

_BUDGET_S = 30.0
# Our DDP, which has no backend, is listed among the backends of PyTorch's DDP under this name.
OURS, REFERENCE = "labkit ddp", "gloo"
# Samples per rank and step, by model: few, so that communication is a large part of a step.
BATCH_SIZES = {"small_cnn": 32, "resnet18": 8, "vgg16": 4}


def bench_ddp(
    world_sizes: tuple[int, ...] = (2,),
    models: tuple[str, ...] = tuple(BATCH_SIZES),
    repeats: int = 30,
    where: Where = ANYWHERE,
) -> Iterator[Result]:
    """Time steps of DDP (forward, backward, update), one result for each model and world size.

    Args:
        world_sizes: of the runs, each at least 2.
        models: names out of ``BATCH_SIZES``.
        repeats: steps at most; slow models get fewer, at least 5.
        where: the ranks' devices; NCCL takes part where each rank has a GPU.

    Raises:
        ValueError: an unknown model or an impossible world size, before anything runs.
        WorkerError: a step failed.
    """
    check_settings("DDP", world_sizes, repeats, where)
    for model in models:
        check_choice("model", model, BATCH_SIZES)

    def result(world_size: int, model: str) -> Result:
        by_rank = on_ranks(measure, model, repeats, world_size=world_size, where=where)

        def error(case: Any, name: str, spread: Any) -> float:
            return max(rank["error"][name] for rank in by_rank)

        def replicas(case: Any, name: str, spread: Any) -> str:
            digests = {rank["digest"][name] for rank in by_rank}
            return "equal" if len(digests) == 1 else "DIFFERENT"

        count, batch_size = by_rank[0]["num_parameters"], BATCH_SIZES[model]
        facts = {"model": model, "num_parameters": count, "world_size": world_size}
        return Result(
            f"DDP step of {model} ({count / 1e6:.3g} million parameters), {world_size} ranks, "
            f"{batch_size} samples per rank, in turns; gradients' error: relative to gloo's",
            facts | {"batch_size": batch_size},
            {"": slowest([rank["seconds"] for rank in by_rank])},
            (REFERENCE,),
            columns={"gradient_error": error, "replicas": replicas},
        )

    return itertools.starmap(result, itertools.product(world_sizes, models))


def measure(comm: Comm, model: str, repeats: int) -> dict[str, Any]:
    """Measure on this rank, by backend: seconds, gradient error, digest of the parameters.

    The error is the largest difference from gloo's gradients in the first step, relative to a
    parameter's largest gradient.
    """
    torch.manual_seed(0)
    samples = ModelStep(model, BATCH_SIZES[model], seed=comm.rank)
    base = samples.model.to(comm.device)
    images, classes = samples.samples.to(comm.device), samples.classes.to(comm.device)

    def step_of(wrapped: nn.Module) -> Turn:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)

        def train() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(images), classes).backward()
            optimizer.step()

        return lambda: timed(comm, train)

    with process_groups(comm) as groups:
        contenders: dict[str, nn.Module] = {
            name: DistributedDataParallel(copy.deepcopy(base), process_group=group)
            for name, group in groups.items()
        }
        contenders[OURS] = BucketedDDP(comm, copy.deepcopy(base))
        steps = {name: step_of(wrapped) for name, wrapped in contenders.items()}
        for step in steps.values():
            step()
        gradients = {name: _by_number(one, "grad") for name, one in contenders.items()}
        truth = gradients[REFERENCE]
        seconds = take_turns(comm, steps, repeats, _BUDGET_S)
        # Buffers may differ by rank and are left out.
        parameters = {name: _by_number(one, "data") for name, one in contenders.items()}
    return {
        "num_parameters": sum(parameter.numel() for parameter in base.parameters()),
        "error": {name: largest_difference(mine, truth) for name, mine in gradients.items()},
        "seconds": seconds,
        "digest": {name: checksum(mine) for name, mine in parameters.items()},
    }


def _by_number(model: nn.Module, part: str) -> dict[str, Tensor]:
    # Each DDP adds its own prefix to the names.
    return {str(at): getattr(p, part).cpu().clone() for at, p in enumerate(model.parameters())}
