"""Answers to ``check.parameter_server``."""

from functools import partial

import numpy as np
import torch
from graded import Answers, ends

from labkit.collectives import ring_all_reduce, share_only, share_reduce
from labkit.collectives.ring import split_chunks
from labkit.schedules.ring import chunk_bounds
from workbook import check


def workers(comm):
    return range(1, comm.world_size)


# one_by_one(comm, values)


def answers_at_once(comm, values):
    for rank in workers(comm):
        values -= 0.1 * comm.recv(torch.empty_like(values), rank)
        comm.send(values, rank)


def answers_from_new_parameters(comm, values):
    answers_at_once(comm, values.clone())


# server(comm, values, batch_size)


def serves(comm, values, batch_size, first=0.0):
    total = first * values
    for rank in workers(comm):
        total = total + comm.recv(torch.empty_like(values), rank)
    values -= 0.1 * total / batch_size
    for rank in workers(comm):
        comm.send(values, rank)


def serves_the_first_worker_alone(comm, values, batch_size):
    incoming = comm.recv(torch.empty_like(values), 1)
    values -= 0.1 * incoming / batch_size
    comm.send(values, 1)


def adds_as_they_come(comm, values, batch_size):
    total, incoming = torch.zeros_like(values), torch.empty_like(values)
    waiting = list(workers(comm))
    while waiting:
        waiting.remove(comm.recv_any(incoming, waiting))
        total += incoming
    values -= 0.1 * total / batch_size
    for rank in workers(comm):
        comm.send(values, rank)


# worker(comm, gradient, values, servers)


def works_in_numpy(comm, gradient, values, servers):
    for server, part in enumerate(np.array_split(gradient.numpy(), servers)):
        comm.send(torch.from_numpy(part.copy()), server)
    for server, part in enumerate(np.array_split(values.numpy(), servers)):
        comm.recv(torch.from_numpy(part), server)


def works(comm, gradient, values, servers, way=1, pulls_first=False):
    bounds = chunk_bounds(len(gradient), servers)
    for server, (start, end) in enumerate(bounds):
        if not pulls_first:
            comm.send(gradient[start:end], server)
    for server, (start, end) in enumerate(bounds[::way]):
        comm.recv(values[start:end], server)


def pushes_parameters(comm, gradient, values, servers):
    works(comm, values.clone(), values, servers)


# shards(comm, gradient, values, batch_size)


def does_both(comm, gradient, values, batch_size):
    chunks, mine = split_chunks(gradient, comm.world_size), (comm.rank + 1) % comm.world_size
    share_reduce(comm, chunks)
    pieces = split_chunks(values, comm.world_size)
    pieces[mine] -= 0.1 * chunks[mine] / batch_size
    share_only(comm, pieces)


ANSWERS = [
    Answers(
        check.parameter_server.one_by_one,
        [answers_at_once],
        [
            partial(serves, batch_size=1),
            answers_from_new_parameters,
        ],
    ),
    Answers(
        check.parameter_server.server,
        [serves],
        [
            partial(serves, first=1.0),
            adds_as_they_come,
            ends(serves_the_first_worker_alone),
        ],
        on=4,
    ),
    Answers(
        check.parameter_server.worker,
        [works_in_numpy],
        [
            ends(partial(works, way=-1)),
            pushes_parameters,
            ends(partial(works, pulls_first=True)),
        ],
    ),
    Answers(
        check.parameter_server.shards,
        [does_both],
        [
            lambda comm, gradient, values, batch_size: values.copy_(
                ring_all_reduce(comm, gradient)
            ),
            lambda comm, gradient, values, batch_size: values.sub_(gradient / batch_size),
        ],
    ),
]
