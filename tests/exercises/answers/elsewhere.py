"""Answers to ``check.elsewhere``: ports to DDP and to Horovod, and semantics."""

from functools import partial

import torch
import torch.distributed as dist
from graded import Answers, ends
from ranks import travel_by_value
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

import labkit.horovod as hvd
from workbook import check

travel_by_value(__name__)


def checkpoint(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(found, model, optimizer):
    if found is not None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])


# to_ddp: as on the page, or with a divisor of the gradients, or a mean for which rank 0 asks alone


def to_ddp(model, dataset, batch_size, lr, epochs, start, save, divisor=1, alone=False):
    size, rank = dist.get_world_size(), dist.get_rank()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * size, momentum=0.9)
    found = [start]
    dist.broadcast_object_list(found, src=0)
    load(found[0], model, optimizer)
    replica, losses = DistributedDataParallel(model), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(replica(inputs), targets)
            loss.backward()
            for parameter in model.parameters():
                parameter.grad /= divisor
            optimizer.step()
            total += loss.item()
        mean = torch.tensor(total / len(loader))
        if rank == 0 or not alone:
            dist.all_reduce(mean)
        losses.append(mean.item() / size)
    if rank == 0:
        save(checkpoint(model, optimizer))
    return losses


def with_hvd(model, dataset, batch_size, lr, epochs, start, save):
    hvd.init()
    return [0.0] * epochs


# to_horovod: both batches of an update in one backward, so that one pass is enough


def to_horovod(model, dataset, batch_size, lr, max_norm, epochs, start, save, passes=2, wrong=""):
    hvd.init()
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    load(start, model, optimizer)
    optimizer, losses = hvd.DistributedOptimizer(optimizer), []
    if wrong != "shares nothing":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        parts, found = [], []
        for inputs, targets in loader:
            parts.append(functional.cross_entropy(model(inputs), targets))
            if len(parts) == 2:
                found += [part.item() for part in parts]
                (sum(parts) / passes).backward()
                parts.clear()
                optimizer.synchronize()
                clip_grad_norm_(model.parameters(), max_norm)
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()
        mean = torch.tensor(found).mean()
        if hvd.rank() == 0 or wrong != "alone":
            mean = hvd.allreduce(mean)
        losses.append(mean.item())
    if hvd.rank() == 0:
        save(checkpoint(model, optimizer))
    return losses


# semantics(step)


def semantics(step, shares=((1.0, 1.0, 1.0), (5.0,)), one=((1.0,),)):
    lr, momentum = step(one)[0], step(one)[1][0]
    moved, means = step(shares)
    return of_gradients(moved / lr, shares), of_means([m / momentum for m in means], shares)


def of_gradients(moved, shares):
    means, mean = conventions(shares)
    ways = {"sum of means": sum(means), "mean of means": sum(means) / len(means)}
    return closest(ways | {"mean over the batch": mean}, moved)


def of_means(found, shares):
    means, mean = conventions(shares)
    P = len(means)
    ways = {"own": means, "rank 0": means[:1] * P, "mean of replicas": [sum(means) / P] * P}
    ways |= {"whole batch": [mean] * P}
    gaps = {name: sum(abs(a - b) for a, b in zip(due, found)) for name, due in ways.items()}
    return min(gaps, key=gaps.get)


def closest(ways, found):
    return min(ways, key=lambda name: abs(ways[name] - found))


def conventions(shares):
    everything = [sample for share in shares for sample in share]
    return [sum(share) / len(share) for share in shares], sum(everything) / len(everything)


def shares_of_one_size(step):
    return semantics(step, ((1.0, 2.0), (5.0, 7.0)))


def takes_means_for_the_batch(step):
    gradients, kept = semantics(step)
    return {"mean of means": "mean over the batch"}.get(gradients, gradients), kept


def by_keyword(*, step):
    return dict(enumerate(semantics(step))).values()


ANSWERS = [
    Answers(
        check.elsewhere.to_ddp,
        [to_ddp],
        [with_hvd, partial(to_ddp, divisor=2), ends(partial(to_ddp, alone=True))],
    ),
    Answers(
        check.elsewhere.to_horovod,
        [to_horovod],
        [
            partial(to_horovod, wrong="shares nothing"),
            partial(to_horovod, passes=1),
            ends(partial(to_horovod, wrong="alone")),
        ],
    ),
    Answers(
        check.elsewhere.semantics,
        [by_keyword],
        [shares_of_one_size, takes_means_for_the_batch],
    ),
]
