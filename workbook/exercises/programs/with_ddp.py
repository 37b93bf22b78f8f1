"""What the second exercise of page 16 starts from: training with PyTorch's DDP."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def train(
    model: nn.Module,
    dataset: Dataset,
    batch_size: int,
    lr: float,
    max_norm: float,
    epochs: int,
    start: dict[str, Any] | None,
    save: Callable[[dict[str, Any]], object],
) -> list[float]:
    """Train ``model``, which every rank has made for itself; returns the mean loss per epoch.

    An update takes two batches, and clips the gradient to a norm of ``max_norm``. ``start`` is a
    checkpoint, {"model": ..., "optimizer": ...}, or None; every rank has it.
    """
    dist.init_process_group("gloo")
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * dist.get_world_size(), momentum=0.9)
    if start is not None:
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
    replica = DistributedDataParallel(model)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for number, (inputs, targets) in enumerate(loader, start=1):
            with nullcontext() if number % 2 == 0 else replica.no_sync():
                loss = functional.cross_entropy(replica(inputs), targets)
                (loss / 2).backward()
            total += loss.item()
            if number % 2 == 0:
                clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
        mean = torch.tensor(total / len(loader))
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    dist.destroy_process_group()
    return losses
