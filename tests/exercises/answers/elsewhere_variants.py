"""Right answers to ``check.elsewhere``, in other clothes."""

import torch
import torch.distributed as dist
from graded import Answers
from ranks import travel_by_value
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

import labkit.horovod as hvd
from answers.elsewhere import (
    Port,
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


def of_another_loader(model, dataset, batch_size, lr, epochs, start, save):
    """Batches by a sampler of batches; ranks have swapped their shares."""
    P, rank = dist.get_world_size(), dist.get_rank()
    sampler = DistributedSampler(dataset, P, (rank + 1) % P)
    batches = torch.utils.data.BatchSampler(sampler, batch_size, drop_last=False)
    loader = DataLoader(dataset, batch_sampler=batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=P * lr, momentum=0.9, foreach=False)
    load(Port.shared(None, start), model, optimizer)
    replica, losses = DistributedDataParallel(model), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for inputs, targets in loader:
            loss = nn.CrossEntropyLoss()(replica(inputs), targets)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss.detach().float(), torch.ones(())])
        dist.all_reduce(sums)
        losses.append((sums[0] / sums[1]).item())
    if rank == 0:
        save(checkpoint(replica.module, optimizer) | {"epoch": epochs})
    return losses


# to_horovod


def horovod_as_on_the_page(model, dataset, batch_size, lr, max_norm, epochs, start, save):
    hvd.init()
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=2
    )
    load(start, model, optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for number, (inputs, targets) in enumerate(loader, start=1):
            loss = functional.cross_entropy(model(inputs), targets)
            (loss / 2).backward()
            total += loss.item()
            if number % 2 == 0:
                optimizer.synchronize()
                clip_grad_norm_(model.parameters(), max_norm)
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()
        losses.append(hvd.allreduce(torch.tensor(total / len(loader)), name="loss").item())
    if hvd.rank() == 0:
        save(checkpoint(model, optimizer))
    return losses


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


def with_numbers_as_on_the_page(step):
    lr, [momentum] = step([[1.0]])
    moved, means = step([[1.0, 1.0, 1.0], [5.0]])
    gradients = {3: "mean of means", 2: "mean over the batch", 6: "sum of means"}
    kept = {(1, 5): "own", (1, 1): "rank 0", (3, 3): "mean of replicas", (2, 2): "whole batch"}
    found = tuple(round(mean / momentum) for mean in means)
    return gradients[round(moved / lr)], kept[found]


ANSWERS = [
    Answers(check.elsewhere.to_ddp, [as_on_the_page, of_another_loader], []),
    Answers(check.elsewhere.to_horovod, [horovod_as_on_the_page, one_backward], []),
    Answers(check.elsewhere.semantics, [with_numbers_as_on_the_page, by_keyword], []),
]
