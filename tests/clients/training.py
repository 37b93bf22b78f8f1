"""What the clients train: a small model, and data that differ from rank to rank."""

import torch
import torch.distributed as dist
from torch import nn


def network():
    """Make the same small classifier on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))


def batches(count=3):
    """Make this rank's batches: samples [6, 8] and labels [6]."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    samples = torch.randn(count, 6, 8, generator=generator)
    labels = torch.randint(6, (count, 6), generator=generator)
    return list(zip(samples, labels))


def train(model, optimizer=None, data=None, backward=torch.Tensor.backward):
    """Train for an epoch; returns the losses and then the parameters, or this rank's shards."""
    # Not Adam, to which a gradient of the wrong size is as good as the right one.
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for samples, labels in data or batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(samples), labels)
        backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return losses + values_of(model)


def values_of(model):
    """Return copies of the parameters, or of this rank's shards of them."""
    values = [parameter.detach() for parameter in model.parameters()]
    return [getattr(value, "to_local", value.clone)() for value in values]
