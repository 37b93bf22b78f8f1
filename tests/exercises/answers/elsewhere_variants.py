"""Right answers to ``check.elsewhere``, in other clothes."""

import torch
import torch.distributed as dist
from graded import Answers
from ranks import travel_by_value
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

import labkit.horovod as hvd
from answers.elsewhere import (
    checkpoint,
    load,
    semantics,
)
from workbook import check

travel_by_value(__name__)


# to_ddp


def as_on_the_page(model, dataset, batch_size, lr, epochs, start, save):
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * size, momentum=0.9)
    found = [start]
    dist.broadcast_object_list(found, src=0)
    load(found[0], model, optimizer)
    replica = DistributedDataParallel(model)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(replica(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        mean = torch.tensor(total / len(loader))
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    if dist.get_rank() == 0:
        save(checkpoint(model, optimizer))
    dist.destroy_process_group()
    return losses


# to_horovod


def one_backward(model, dataset, batch_size, lr, max_norm, epochs, start, save):
    """Both batches of an update in one backward, so that one pass is enough."""
    hvd.init()
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    load(start, model, optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        losses.append(_updates(model, loader, optimizer, max_norm))
    if hvd.rank() == 0:
        save(checkpoint(model, optimizer))
    return losses


def _updates(model, loader, optimizer, max_norm):
    parts, found = [], []
    for inputs, targets in loader:
        parts.append(functional.cross_entropy(model(inputs), targets))
        if len(parts) == 2:
            found += [part.item() for part in parts]
            (sum(parts) / 2).backward()
            parts.clear()
            optimizer.synchronize()
            clip_grad_norm_(model.parameters(), max_norm)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
    return hvd.allreduce(torch.tensor(found).mean()).item()


# semantics


def by_keyword(*, step):
    return dict(enumerate(semantics(step))).values()


ANSWERS = [
    Answers(check.elsewhere.to_ddp, [as_on_the_page], []),
    Answers(check.elsewhere.to_horovod, [one_backward], []),
    Answers(check.elsewhere.semantics, [by_keyword], []),
]
