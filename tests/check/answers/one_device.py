"""Answers to ``check.one_device``."""

import functools
import itertools

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit import check
from labkit.collectives import ring_all_reduce

travel_by_value(__name__)


# accumulate(comm, gradients, num_samples, batch_size)


def accumulates(comm, gradients, num_samples, batch_size):
    total = sum(n * gradient for n, gradient in zip(num_samples, gradients))
    return ring_all_reduce(comm, total) / batch_size


def means_of_means(comm, gradients, num_samples, batch_size):
    return ring_all_reduce(comm, sum(gradients) / len(gradients), "mean")


def sums(comm, gradients, num_samples, batch_size):
    return accumulates(comm, gradients, num_samples, 1)


def divides_by_its_own(comm, gradients, num_samples, batch_size):
    return accumulates(comm, gradients, num_samples, sum(num_samples))


def overwrites(comm, gradients, num_samples, batch_size):
    for n, gradient in zip(num_samples, gradients):
        total = n * gradient
    return ring_all_reduce(comm, total) / batch_size


def keeps_to_itself(comm, gradients, num_samples, batch_size):
    return sum(n * gradient for n, gradient in zip(num_samples, gradients)) / batch_size


def ranks_alike(comm, gradients, num_samples, batch_size):
    mine = keeps_to_itself(comm, gradients, num_samples, sum(num_samples))
    return ring_all_reduce(comm, mine, "mean")


def synchronises_each(comm, gradients, num_samples, batch_size):
    parts = [ring_all_reduce(comm, n * g) for n, g in zip(num_samples, gradients)]
    return sum(parts) / batch_size


def by_a_dot_product(comm, gradients, num_samples, batch_size):
    weights = torch.tensor(num_samples) / batch_size
    return ring_all_reduce(comm, torch.stack(tuple(gradients)).T @ weights)


def in_numpy(comm, gradients, num_samples, batch_size):
    total = np.average(np.stack([g.numpy() for g in gradients]), axis=0, weights=num_samples)
    total = torch.tensor(total * sum(num_samples), dtype=torch.float32)
    return ring_all_reduce(comm, total).numpy() / batch_size


def in_place(comm, gradients, num_samples, batch_size):
    first, *others = (g.mul_(n) for n, g in zip(num_samples, gradients))
    for other in others:
        first.add_(other)
    return ring_all_reduce(comm, first).div_(batch_size)


def in_double(comm, gradients, num_samples, batch_size):
    """Adds up in float64, and sends float32."""
    total = functools.reduce(
        lambda total, pair: total + pair[0] * pair[1].double(),
        zip(num_samples, gradients),
        torch.zeros_like(gradients[0], dtype=torch.float64),
    )
    return ring_all_reduce(comm, (total / batch_size).float()).double()


def by_its_own_mean(comm, gradients, num_samples, batch_size):
    mine = sum(num_samples)
    mean = sum(g * (n / mine) for n, g in zip(num_samples, gradients))
    return ring_all_reduce(comm, mean * mine) / batch_size


def by_its_own_ring(comm, gradients, num_samples, batch_size):
    """The literature's ring, with a remainder in the last chunk."""
    total = sum(n * gradient for n, gradient in zip(num_samples, gradients)) / batch_size
    P, rank = comm.world_size, comm.rank
    size = len(total) // P
    edges = [*(k * size for k in range(P)), len(total)]
    chunks = [total[a:b] for a, b in itertools.pairwise(edges)]
    right, left = (rank + 1) % P, (rank - 1) % P
    for step in range(P - 1):
        target = chunks[(rank - step - 1) % P]
        incoming = torch.empty_like(target)
        comm.exchange(chunks[(rank - step) % P], right, incoming, left)
        target += incoming
    for step in range(P - 1):
        comm.exchange(chunks[(rank - step + 1) % P], right, chunks[(rank - step) % P], left)
    return total


def weighs_by_the_first_rank(comm, gradients, num_samples, batch_size):
    """The sizes that rank 0 has: right there, wrong elsewhere."""
    return accumulates(comm, gradients, [4, 2, 1], batch_size)


def forgets_the_last(comm, gradients, num_samples, batch_size):
    return accumulates(comm, gradients[:-1], num_samples, batch_size)


def in_float16(comm, gradients, num_samples, batch_size):
    return accumulates(comm, [g.half().float() for g in gradients], num_samples, batch_size)


ANSWERS = [
    Answers(
        check.one_device.accumulate,
        [
            accumulates,
            by_a_dot_product,
            in_numpy,
            in_place,
            in_double,
            by_its_own_mean,
            by_its_own_ring,
        ],
        [
            (weighs_by_the_first_rank, "value.wrong"),
            (forgets_the_last, "value.wrong"),
            (in_float16, "value.wrong"),
            (means_of_means, "accumulate.mean_of_means"),
            (sums, "accumulate.sum"),
            (divides_by_its_own, "accumulate.own_samples"),
            (overwrites, "accumulate.last"),
            (keeps_to_itself, "accumulate.own_share"),
            (ranks_alike, "accumulate.mean_of_rank_means"),
            (synchronises_each, "traffic.off_target"),
        ],
    ),
]
