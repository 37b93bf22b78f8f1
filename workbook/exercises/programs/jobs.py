"""The broken jobs of page 13. On which rank, when and by how much each fails is in its data.

Symbols: P ranks, B samples of a batch, D inputs.
"""

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from labkit.collectives import ring_all_reduce
from labkit.comm.comm import Comm
from labkit.workload.samples import share

HARD = 2.0
SPOILT = 100.0

# (inputs [B, D], targets [B, 1]) of one step.
Batch = tuple[Tensor, Tensor]
# What a rank writes down of a step, by name.
Logged = dict[str, Any]


def mismatch(losses: Tensor, group: Any) -> None:
    """Average a gradient per step; ``losses`` [STEPS, B] are this rank's own. Plain PyTorch."""
    everyone = [torch.empty(losses.shape[1]) for _ in range(dist.get_world_size(group))]
    for own in losses:
        gradient = own - own.mean()
        if own.max() > HARD:
            dist.all_gather(everyone, own, group=group)  # the log shows batches with hard samples
        dist.all_reduce(gradient, group=group)


def drift(comm: Comm, model: nn.Module, batches: list[list[Batch]]) -> list[Logged]:
    """Fit ``model`` to the batches of this rank."""
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.02), []
    for inputs, targets in batches[comm.rank]:
        loss = functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(comm, model, comm.world_size)
        if loss < SPOILT:  # a batch with wrong targets must not spoil the model
            optimizer.step()
        log.append(logged(loss, model))
    return log


def divisor(
    comm: Comm, model: nn.Module, batches: list[Batch], recipe: dict[str, int]
) -> list[Logged]:
    """Fit ``model`` to batches of all ranks.

    ``recipe``: the ``size`` of a micro-batch, how many ``micro_batches`` a rank has in a step, and
    how many ``ranks`` there are.
    """
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.05), []
    for batch in batches:
        inputs, targets = (share(part, comm.rank, comm.world_size) for part in batch)
        optimizer.zero_grad()
        losses = []
        for x, y in zip(inputs.split(recipe["size"]), targets.split(recipe["size"])):
            losses.append(functional.mse_loss(model(x), y))
            (losses[-1] / recipe["micro_batches"]).backward()
        own = flat_gradient(model)
        average_gradients(comm, model, recipe["ranks"])
        optimizer.step()
        log.append(logged(torch.stack(losses).mean(), model))
        log[-1] |= {"own": own, "used": flat_gradient(model)}
    return log


def average_gradients(comm: Comm, model: nn.Module, divide_by: int) -> None:
    """One all-reduce per parameter, then the division."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            ring_all_reduce(comm, parameter.grad).div_(divide_by)


def flat_gradient(model: nn.Module) -> Tensor:
    """[number of parameters]"""
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def logged(loss: Tensor, model: nn.Module) -> Logged:
    """The loss; all parameters and buffers by name, and their CRC-32: equal bits, equal number."""
    state = {name: one.detach().clone() for name, one in model.state_dict().items()}
    checksums = {name: zlib.crc32(one.numpy()) for name, one in state.items()}
    return {"loss": loss.item(), "state": state, "checksums": checksums}
