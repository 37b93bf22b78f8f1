"""Answers to ``check.parameter_server``."""

from functools import partial

import numpy as np
import torch
from graded import Answers, ends
from ranks import travel_by_value

from labkit.collectives import ring_all_reduce, share_only, share_reduce
from labkit.collectives.ring import split_chunks
from labkit.schedules.ring import chunk_bounds
from workbook import check

travel_by_value(__name__)


def workers(comm):
    return range(1, comm.world_size)


# The server that answers one by one: (comm, values)


def answers_at_once(comm, values, lr=0.1, order=1):
    for rank in workers(comm)[::order]:
        values -= lr * comm.recv(torch.empty_like(values), rank)
        comm.send(values, rank)


def answers_from_new_parameters(comm, values):
    for rank in workers(comm):
        values = values - 0.1 * comm.recv(torch.empty_like(values), rank)
        comm.send(values, rank)


def collects_without_dividing(comm, values):
    serves(comm, values, 1)


# The server: (comm, values, batch_size)


def serves(comm, values, batch_size, first=0.0):
    total, incoming = first * values, torch.empty_like(values)
    for rank in workers(comm):
        total = total + comm.recv(incoming, rank)
    values -= 0.1 * total / batch_size
    for rank in workers(comm):
        comm.send(values, rank)


def serves_the_first_worker_alone(comm, values, batch_size):
    incoming = comm.recv(torch.empty_like(values), 1)
    values -= 0.1 * incoming / batch_size
    comm.send(values, 1)


def serves_by_optimizer(comm, values, batch_size):
    values.grad = torch.zeros_like(values)
    for rank in workers(comm):
        values.grad += comm.recv(torch.empty_like(values), rank) / batch_size
    torch.optim.SGD([values], lr=0.1).step()
    for rank in workers(comm):
        comm.send(values, rank)


# A worker: (comm, gradient, values, servers)


def works_in_numpy(comm, gradient, values, servers):
    for server, part in enumerate(np.array_split(gradient.numpy(), servers)):
        comm.send(torch.from_numpy(part.copy()), server)
    for server, part in enumerate(np.array_split(values.numpy(), servers)):
        comm.recv(torch.from_numpy(part), server)


def works(comm, gradient, values, servers, pushed=slice(None), pulled=slice(None)):
    bounds = chunk_bounds(len(gradient), servers)
    for server, (start, end) in enumerate(bounds[pushed]):
        comm.send(gradient[start:end], server)
    for server, (start, end) in enumerate(bounds[pulled]):
        comm.recv(values[start:end], server)


def pushes_parameters(comm, gradient, values, servers):
    works(comm, values.clone(), values, servers)


def pulls_first(comm, gradient, values, servers):
    for server, part in enumerate(values.tensor_split(servers)):
        comm.recv(part, server)
    works(comm, gradient, values, servers)


# Both at once: (comm, gradient, values, batch_size)


def does_both(comm, gradient, values, batch_size):
    chunks, mine = split_chunks(gradient, comm.world_size), (comm.rank + 1) % comm.world_size
    share_reduce(comm, chunks)
    pieces = split_chunks(values, comm.world_size)
    pieces[mine] -= 0.1 * chunks[mine] / batch_size
    share_only(comm, pieces)


def everyone_by_turns(comm, gradient, values, batch_size, own=True):
    """Each slice goes straight to the rank that serves it, into one tensor for the sum."""
    P, rank = comm.world_size, comm.rank
    pushed, pulled = gradient.tensor_split(P), values.tensor_split(P)
    total = pushed[rank].clone() if own else torch.zeros_like(pushed[rank])
    for turn in range(1, P):
        dst, src = (rank + turn) % P, (rank - turn) % P
        incoming = torch.empty_like(total)
        comm.exchange(pushed[dst], dst, incoming, src)
        total = total + incoming
    pulled[rank].sub_(total, alpha=0.1 / batch_size)
    for turn in range(1, P):
        dst, src = (rank + turn) % P, (rank - turn) % P
        comm.exchange(pulled[rank], dst, pulled[src], src)


def ends_with_the_sum(comm, gradient, values, batch_size):
    values.copy_(ring_all_reduce(comm, gradient))


ANSWERS = [
    Answers(
        check.parameter_server.one_by_one,
        [answers_at_once],
        [collects_without_dividing, answers_from_new_parameters],
    ),
    Answers(
        check.parameter_server.server,
        [serves_by_optimizer],
        [
            partial(serves, first=1.0),
            ends(serves_the_first_worker_alone),
        ],
        on=4,
    ),
    Answers(
        check.parameter_server.worker,
        [works_in_numpy],
        [ends(partial(works, pulled=slice(None, None, -1))), pushes_parameters, ends(pulls_first)],
    ),
    Answers(
        check.parameter_server.shards,
        [does_both],
        [ends_with_the_sum, partial(everyone_by_turns, own=False)],
    ),
]
