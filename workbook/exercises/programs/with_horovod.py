"""The start of page 18's third exercise: training with Horovod's interface."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import labkit.horovod as hvd


def train(
    model: nn.Module,
    dataset: Dataset,
    batch_size: int,
    lr: float,
    epochs: int,
    start: dict[str, Any] | None,
    save: Callable[[dict[str, Any]], object],
) -> list[float]:
    """Train ``model``, which every rank has made for itself; returns the mean loss per epoch.

    ``batch_size`` is that of a rank. ``start`` is a checkpoint, {"model": ..., "optimizer": ...},
    or None; only rank 0 has it. ``save`` writes one.
    """
    hvd.init()
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    if start is not None:
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        mean = hvd.allreduce(torch.tensor(total / len(loader)), name="loss")
        losses.append(mean.item())
    if hvd.rank() == 0:
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return losses
