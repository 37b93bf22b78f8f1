"""Answers to ``check.parameter_server``."""

from functools import partial

import torch
from graded import Answers
from ranks import travel_by_value

from labkit import check
from labkit.collectives import naive_all_reduce, ring_all_reduce, share_only, share_reduce
from labkit.collectives.ring import split_chunks
from labkit.schedules.ring import chunk_bounds

travel_by_value(__name__)


def workers(comm):
    return range(1, comm.world_size)


# The server: (comm, values, batch_size)


def serves(comm, values, batch_size, divisor=None, uphill=False, overwrite=False, first=0.0):
    total, incoming = first * values, torch.empty_like(values)
    for rank in workers(comm):
        comm.recv(incoming, rank)
        total = incoming.clone() if overwrite else total + incoming
    values += (0.1 if uphill else -0.1) * total / (divisor or batch_size)
    for rank in workers(comm):
        comm.send(values, rank)


def divides_by_workers(comm, values, batch_size):
    serves(comm, values, batch_size, divisor=comm.world_size - 1)


def collected(comm, values):
    total, incoming = torch.zeros_like(values), torch.empty_like(values)
    for rank in workers(comm):
        total += comm.recv(incoming, rank)
    return total


def sends_the_old_ones(comm, values, batch_size):
    old = values.clone()
    values -= 0.1 * collected(comm, values) / batch_size
    for rank in workers(comm):
        comm.send(old, rank)


def sends_the_sum(comm, values, batch_size):
    total = collected(comm, values)
    values -= 0.1 * total / batch_size
    for rank in workers(comm):
        comm.send(total, rank)


def waits_for_nobody(comm, values, batch_size):
    incoming = torch.empty_like(values)
    for rank in workers(comm):
        values -= 0.1 * comm.recv(incoming, rank) / batch_size
        comm.send(values, rank)


def updates_at_every_push(comm, values, batch_size):
    total, incoming = torch.zeros_like(values), torch.empty_like(values)
    for rank in workers(comm):
        total += comm.recv(incoming, rank)
        values -= 0.1 * total / batch_size
    for rank in workers(comm):
        comm.send(values, rank)


def makes_new_parameters(comm, values, batch_size):
    values = values - 0.1 * collected(comm, values) / batch_size
    for rank in workers(comm):
        comm.send(values, rank)


def serves_the_first_worker_alone(comm, values, batch_size):
    incoming = comm.recv(torch.empty_like(values), 1)
    values -= 0.1 * incoming / batch_size
    comm.send(values, 1)


# A worker: (comm, gradient, values, servers)


def works(comm, gradient, values, servers, pushed=slice(None), pulled=slice(None)):
    bounds = chunk_bounds(len(gradient), servers)
    for server, (start, end) in enumerate(bounds[pushed]):
        comm.send(gradient[start:end], server)
    for server, (start, end) in enumerate(bounds[pulled]):
        comm.recv(values[start:end], server)


def interleaves(comm, gradient, values, servers):
    """Right but slower: it pulls from one server before it pushes to the next."""
    for server, (start, end) in enumerate(chunk_bounds(len(gradient), servers)):
        comm.send(gradient[start:end], server)
        comm.recv(values[start:end], server)


def pulls_into_nothing(comm, gradient, values, servers):
    works(comm, gradient, values.clone(), servers)


def adds_what_it_pulls(comm, gradient, values, servers):
    new = values.clone()
    works(comm, gradient, new, servers)
    values += new


def pushes_parameters(comm, gradient, values, servers):
    works(comm, values.clone(), values, servers)


def pushes_an_update(comm, gradient, values, servers):
    works(comm, 0.1 * gradient, values, servers)


def updates_again(comm, gradient, values, servers):
    works(comm, gradient, values, servers)
    values -= 0.1 * gradient


def pushes_everything_everywhere(comm, gradient, values, servers):
    for server in range(servers):
        comm.send(gradient, server)


# Both at once: (comm, gradient, values, batch_size)


def does_both(comm, gradient, values, batch_size, divisor=None, sign=1, own=1, share=True):
    chunks, mine = split_chunks(gradient, comm.world_size), (comm.rank + own) % comm.world_size
    share_reduce(comm, chunks)
    pieces = split_chunks(values, comm.world_size)
    pieces[mine] -= sign * 0.1 * chunks[mine] / (divisor or batch_size)
    if share:
        share_only(comm, pieces)


def both_divide_by_ranks(comm, gradient, values, batch_size):
    does_both(comm, gradient, values, batch_size, divisor=comm.world_size)


def everyone_for_itself(comm, gradient, values, batch_size):
    values -= 0.1 * gradient / batch_size


def through_one_rank(comm, gradient, values, batch_size):
    values -= 0.1 * naive_all_reduce(comm, gradient) / batch_size


SERVER = [
    (partial(serves, overwrite=True), "server.last_push_only"),
    (partial(serves, divisor=1), "server.not_divided"),
    (divides_by_workers, "server.over_workers"),
    (partial(serves, uphill=True), "server.wrong_sign"),
    (partial(serves, first=1.0), "server.parameters_in_sum"),
    (sends_the_old_ones, "server.sent_old"),
    (sends_the_sum, "server.sent_sum"),
    (waits_for_nobody, "server.asynchronous"),
    (updates_at_every_push, "server.update_per_push"),
    (makes_new_parameters, "server.not_in_place"),
    (serves_the_first_worker_alone, "run.stuck"),
]
WORKER = [
    (partial(works, pushed=slice(None, None, -1)), "run.stuck"),
    (partial(works, pulled=slice(None, None, -1)), "run.stuck"),
    (pulls_into_nothing, "worker.unchanged"),
    (adds_what_it_pulls, "worker.added"),
    (pushes_parameters, "worker.pushed_parameters"),
    (pushes_an_update, "worker.scaled"),
    (updates_again, "worker.updated_again"),
    (pushes_everything_everywhere, "run.stuck"),
    (partial(works, pushed=slice(0)), "run.stuck"),
]


def ends_with_the_sum(comm, gradient, values, batch_size):
    values.copy_(ring_all_reduce(comm, gradient))


SHARDS = [
    (ends_with_the_sum, "shards.sum"),
    (partial(does_both, divisor=1), "server.not_divided"),
    (both_divide_by_ranks, "shards.over_ranks"),
    (partial(does_both, sign=-1), "server.wrong_sign"),
    (partial(does_both, own=0), "shards.unchanged"),
    (partial(does_both, share=False), "shards.own_slice"),
    (everyone_for_itself, "shards.own_gradient"),
    (through_one_rank, "traffic.off_target"),
]
ANSWERS = [
    Answers(check.parameter_server.server, [serves], SERVER),
    Answers(check.parameter_server.worker, [works, interleaves], WORKER),
    Answers(check.parameter_server.shards, [does_both], SHARDS),
]
