"""Answers to ``check.parameter_server``."""

from functools import partial, reduce

import numpy as np
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


def serves_as_they_come(comm, values, batch_size):
    waiting, pushes = {*workers(comm)}, []
    while waiting:
        incoming = torch.empty_like(values)
        waiting.remove(comm.recv_any(incoming, waiting))
        pushes.append(incoming)
    values.sub_(torch.stack(pushes).sum(0), alpha=0.1 / batch_size)
    for rank in reversed(workers(comm)):
        comm.send(values.clone(), rank)


def serves_in_numpy(comm, values, batch_size):
    table = np.zeros((comm.world_size - 1, len(values)), dtype=np.float32)
    for row, rank in zip(torch.from_numpy(table), workers(comm)):
        comm.recv(row, rank)
    values.numpy()[...] -= np.float32(0.1) * table.sum(axis=0) / batch_size
    [comm.send(values, rank) for rank in workers(comm)]


def divides_each_push(comm, values, batch_size):
    """Steps of a sum: subtracts every push's share, and answers at the end."""
    incoming = torch.zeros(values.shape)
    for rank in range(comm.world_size - 1, 0, -1):
        comm.recv(incoming, rank)
        values -= incoming * 0.1 / batch_size
    for rank in workers(comm):
        comm.send(values, rank)


def serves_with_map(comm, values, batch_size):
    pushes = map(partial(comm.recv, torch.empty_like(values)), workers(comm))
    total = reduce(torch.add, (push.clone() for push in pushes))
    torch.add(values, total, alpha=-0.1 / batch_size, out=values)
    list(map(partial(comm.send, values), workers(comm)))
    return values


def serves_by_optimizer(comm, values, batch_size):
    values.grad = torch.zeros_like(values)
    for rank in workers(comm):
        values.grad += comm.recv(torch.empty_like(values), rank) / batch_size
    torch.optim.SGD([values], lr=0.1).step()
    for rank in workers(comm):
        comm.send(values, rank)


def counts_workers_in_float16(comm, values, batch_size):
    total, incoming = torch.zeros_like(values), torch.empty_like(values)
    for rank in workers(comm):
        total += comm.recv(incoming, rank)
    values -= (0.1 * total / batch_size).half().float()
    for rank in workers(comm):
        comm.send(values, rank)


def learns_at_another_rate(comm, values, batch_size):
    serves(comm, values, batch_size * 0.1 / 0.01)


# A worker: (comm, gradient, values, servers)


def works_with_views(comm, gradient, values, servers):
    for server, part in enumerate(gradient.tensor_split(servers)):
        comm.send(part, server)
    for server, part in enumerate(values.tensor_split(servers)):
        comm.recv(part, server)


def starts_elsewhere(comm, gradient, values, servers):
    """Each worker begins with another server, and pulls in the same order."""
    bounds = chunk_bounds(len(values), servers)
    turns = [(comm.rank + k) % servers for k in range(servers)]
    for push in (True, False):
        for server in turns:
            part = slice(*bounds[server])
            if push:
                comm.send(gradient[part].clone(), server)
            else:
                comm.recv(values[part], server)


def pulls_beside_and_copies(comm, gradient, values, servers):
    bounds = chunk_bounds(len(values), servers)
    for server, (start, end) in enumerate(bounds):
        comm.send(gradient.narrow(0, start, end - start), server)
    new = [comm.recv(torch.empty(end - start), k) for k, (start, end) in enumerate(bounds)]
    values.copy_(torch.cat(new))


def works_in_numpy(comm, gradient, values, servers):
    for server, part in enumerate(np.array_split(gradient.numpy(), servers)):
        comm.send(torch.from_numpy(part.copy()), server)
    for server, part in enumerate(np.array_split(values.numpy(), servers)):
        comm.recv(torch.from_numpy(part), server)


def rounds_the_slices_up(comm, gradient, values, servers):
    """torch.chunk cuts 10 into 5 and 5, but 1 into 1: with few elements a server gets nothing."""
    for server, part in enumerate(gradient.chunk(servers)):
        comm.send(part, server)
    for server, part in enumerate(values.chunk(servers)):
        comm.recv(part, server)


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


def through_a_ring(comm, gradient, values, batch_size):
    """An all-reduce and the same update on every rank: as many bytes, as the text says."""
    values -= 0.1 * ring_all_reduce(comm, gradient) / batch_size


def by_hand(comm, gradient, values, batch_size):
    """The literature's numbering: rank r owns chunk r."""
    P, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % P, (rank - 1) % P
    pushed, pulled = list(gradient.tensor_split(P)), list(values.tensor_split(P))
    for step in range(1, P):
        incoming = torch.empty_like(pushed[(rank - step - 1) % P])
        comm.exchange(pushed[(rank - step) % P], right, incoming, left)
        pushed[(rank - step - 1) % P].add_(incoming)
    pulled[rank].sub_(pushed[rank], alpha=0.1 / batch_size)
    for step in range(P - 1):
        comm.exchange(pulled[(rank - step) % P], right, pulled[(rank - step - 1) % P], left)


def updates_a_copy_of_the_chunk(comm, gradient, values, batch_size):
    mine = (comm.rank + 1) % comm.world_size
    gradients = [part.clone() for part in gradient.tensor_split(comm.world_size)]
    share_reduce(comm, gradients)
    new = [part.clone() for part in values.tensor_split(comm.world_size)]
    new[mine] = new[mine] - 0.1 * gradients[mine] / batch_size
    share_only(comm, new)
    torch.cat(new, out=values)


def divides_before_it_pushes(comm, gradient, values, batch_size):
    gradient.mul_(0.1 / batch_size)
    chunks, parts = gradient.tensor_split(comm.world_size), values.tensor_split(comm.world_size)
    share_reduce(comm, chunks)
    mine = (comm.rank + 1) % comm.world_size
    parts[mine].copy_(parts[mine] - chunks[mine])
    share_only(comm, parts)


def everyone_to_everyone(comm, gradient, values, batch_size):
    """Each slice goes straight to the rank that serves it: as many bytes, all ranks' links."""
    P, rank = comm.world_size, comm.rank
    pushed, pulled = gradient.tensor_split(P), values.tensor_split(P)
    for step in range(1, P):
        dst, src = (rank + step) % P, (rank - step) % P
        incoming = torch.empty_like(pushed[rank])
        comm.exchange(pushed[dst], dst, incoming, src)
        pulled[rank].sub_(0.1 * incoming / batch_size)
    pulled[rank].sub_(0.1 * pushed[rank] / batch_size)
    for step in range(1, P):
        dst, src = (rank + step) % P, (rank - step) % P
        comm.exchange(pulled[rank], dst, pulled[src], src)


def serves_itself_twice(comm, gradient, values, batch_size):
    does_both(comm, gradient, values, batch_size)
    values[:1] -= 0.1 * gradient[:1] / batch_size


SERVER = [
    (counts_workers_in_float16, "value.wrong"),
    (learns_at_another_rate, "value.wrong"),
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
    (rounds_the_slices_up, "run.stuck"),
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
    (serves_itself_twice, "value.wrong"),
]
ANSWERS = [
    Answers(
        check.parameter_server.server,
        [
            serves,
            serves_as_they_come,
            serves_in_numpy,
            divides_each_push,
            serves_with_map,
            serves_by_optimizer,
        ],
        SERVER,
    ),
    Answers(
        check.parameter_server.worker,
        [
            works,
            interleaves,
            works_with_views,
            starts_elsewhere,
            pulls_beside_and_copies,
            works_in_numpy,
        ],
        WORKER,
    ),
    Answers(
        check.parameter_server.shards,
        [
            does_both,
            through_a_ring,
            by_hand,
            updates_a_copy_of_the_chunk,
            divides_before_it_pushes,
            everyone_to_everyone,
        ],
        SHARDS,
    ),
]
