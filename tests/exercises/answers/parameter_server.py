"""Answers to ``check.parameter_server``."""

from functools import partial, reduce

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit.collectives import naive_all_reduce, ring_all_reduce, share_only, share_reduce
from labkit.collectives.ring import split_chunks
from labkit.schedules.ring import chunk_bounds
from workbook import check

travel_by_value(__name__)


def workers(comm):
    return range(1, comm.world_size)


# A worker of one server: (comm, gradient, values)


def pushes_and_pulls(comm, gradient, values, pushed=1.0):
    comm.send(pushed * gradient, 0)
    comm.recv(values, 0)


def pulls_beside(comm, gradient, values):
    comm.send(gradient, 0)
    values[:] = comm.recv(torch.empty_like(values), 0)


def pushes_and_pulls_in_numpy(comm, gradient, values):
    comm.send(torch.from_numpy(gradient.numpy().copy()), 0)
    comm.recv(torch.from_numpy(values.numpy()), 0)


def pushes_by_keyword(*, values, gradient, comm):
    comm.send(tensor=gradient, dst=0)
    return comm.recv(tensor=values, src=0)


def pulls_from_any(comm, gradient, values):
    comm.send(gradient.clone(), dst=0)
    comm.recv_any(values, [0])


def takes_both_ways_as_one(comm, gradient, values):
    for way, tensor in ((comm.send, gradient), (comm.recv, values)):
        way(tensor, 0)


def waits_before_it_pushes(comm, gradient, values):
    comm.recv(values, 0)
    comm.send(gradient, 0)


def as_only_worker(fn):
    """A wrong worker of several servers, as one of a single server."""
    return lambda comm, gradient, values: fn(comm, gradient, values, 1)


# The server that answers one by one: (comm, values)


def answers_at_once(comm, values, lr=0.1, order=1):
    for rank in workers(comm)[::order]:
        values -= lr * comm.recv(torch.empty_like(values), rank)
        comm.send(values, rank)


def answers_whoever_comes(comm, values):
    waiting, push = {*workers(comm)}, torch.empty_like(values)
    while waiting:
        rank = comm.recv_any(push, waiting)
        waiting.remove(rank)
        values.sub_(push, alpha=0.1)
        comm.send(values, rank)


def answers_in_numpy(comm, values):
    array, push = values.numpy(), np.empty(len(values), dtype=np.float32)
    for rank in workers(comm):
        comm.recv(torch.from_numpy(push), rank)
        array -= np.float32(0.1) * push
        comm.send(torch.from_numpy(array.copy()), rank)


def answers_the_rest_later(comm, values, rank=1):
    if rank < comm.world_size:
        values.copy_(values - 0.1 * comm.recv(torch.zeros_like(values), rank))
        comm.send(values, rank)
        answers_the_rest_later(comm, values, rank + 1)


def answers_by_optimizer(comm, values):
    optimizer = torch.optim.SGD([values], lr=0.1)
    for rank in workers(comm):
        values.grad = comm.recv(torch.empty_like(values), rank)
        optimizer.step()
        comm.send(values, rank)


def answers_before_it_updates(comm, values):
    for rank in workers(comm):
        push = comm.recv(torch.empty_like(values), rank)
        comm.send(values, rank)
        values -= 0.1 * push


def forgets_each_update(comm, values):
    for rank in workers(comm):
        comm.send(values - 0.1 * comm.recv(torch.empty_like(values), rank), rank)


def answers_from_new_parameters(comm, values):
    for rank in workers(comm):
        values = values - 0.1 * comm.recv(torch.empty_like(values), rank)
        comm.send(values, rank)


def answers_twice(comm, values):
    answers_at_once(comm, values)
    values -= 0.1


def collects_without_dividing(comm, values):
    serves(comm, values, 1)


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
    """Receives from whoever comes, and adds in the order of the ranks."""
    waiting, pushes = {*workers(comm)}, {}
    while waiting:
        incoming = torch.empty_like(values)
        rank = comm.recv_any(incoming, waiting)
        waiting.remove(rank)
        pushes[rank] = incoming
    total = torch.stack([pushes[rank] for rank in workers(comm)]).sum(0)
    values.sub_(total, alpha=0.1 / batch_size)
    for rank in reversed(workers(comm)):
        comm.send(values.clone(), rank)


def adds_as_they_come(comm, values, batch_size):
    waiting, total, incoming = {*workers(comm)}, torch.zeros_like(values), values.clone()
    while waiting:
        waiting.remove(comm.recv_any(incoming, waiting))
        total += incoming
    values -= 0.1 * total / batch_size
    for rank in workers(comm):
        comm.send(values, rank)


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


def pulls_first(comm, gradient, values, servers):
    for server, part in enumerate(values.tensor_split(servers)):
        comm.recv(part, server)
    works(comm, gradient, values, servers)


# Both at once: (comm, gradient, values, batch_size)


def does_both(comm, gradient, values, batch_size, divisor=None, sign=1, own=1):
    chunks, mine = split_chunks(gradient, comm.world_size), (comm.rank + own) % comm.world_size
    share_reduce(comm, chunks)
    pieces = split_chunks(values, comm.world_size)
    pieces[mine] -= sign * 0.1 * chunks[mine] / (divisor or batch_size)
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


def everyone_by_turns(comm, gradient, values, batch_size, own=True, add=True, pull=True):
    """Each slice goes straight to the rank that serves it, into one tensor for the sum."""
    P, rank = comm.world_size, comm.rank
    pushed, pulled = gradient.tensor_split(P), values.tensor_split(P)
    total = pushed[rank].clone() if own else torch.zeros_like(pushed[rank])
    for turn in range(1, P):
        dst, src = (rank + turn) % P, (rank - turn) % P
        incoming = torch.empty_like(total)
        comm.exchange(pushed[dst], dst, incoming, src)
        total = total + incoming if add else incoming
    pulled[rank].sub_(total, alpha=0.1 / batch_size)
    for turn in range(1, P):
        dst, src = (rank + turn) % P, (rank - turn) % P
        comm.exchange(pulled[rank], dst, pulled[src] if pull else pulled[src].clone(), src)


def keeps_its_own_slice(comm, gradient, values, batch_size):
    own = values.tensor_split(comm.world_size)[comm.rank]
    before = own.clone()
    everyone_by_turns(comm, gradient, values, batch_size)
    own.copy_(before)


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
    (adds_as_they_come, "server.order"),
    (serves_the_first_worker_alone, "run.stuck"),
]
PUSH_AND_PULL = [
    (partial(pushes_and_pulls, pushed=0.1), "worker.scaled"),
    (as_only_worker(pulls_into_nothing), "worker.unchanged"),
    (as_only_worker(adds_what_it_pulls), "worker.added"),
    (as_only_worker(pushes_parameters), "worker.pushed_parameters"),
    (as_only_worker(updates_again), "worker.updated_again"),
    (partial(pushes_and_pulls, pushed=2.0), "value.wrong"),
    (waits_before_it_pushes, "run.stuck"),
]
ONE_BY_ONE = [
    (collects_without_dividing, "one_by_one.collected"),
    (answers_before_it_updates, "one_by_one.sent_old"),
    (forgets_each_update, "one_by_one.own_push"),
    (answers_from_new_parameters, "server.not_in_place"),
    (partial(answers_at_once, lr=-0.1), "server.wrong_sign"),
    (partial(answers_at_once, lr=0.01), "one_by_one.differs"),
    (answers_twice, "one_by_one.differs", "rank 0 holds"),
]
WORKER = [
    (partial(works, pulled=slice(None, None, -1)), "run.stuck"),
    (pulls_into_nothing, "worker.unchanged"),
    (adds_what_it_pulls, "worker.added"),
    (pushes_parameters, "worker.pushed_parameters"),
    (pushes_an_update, "worker.scaled"),
    (updates_again, "worker.updated_again"),
    (pulls_first, "run.stuck"),
]


def ends_with_the_sum(comm, gradient, values, batch_size):
    values.copy_(ring_all_reduce(comm, gradient))


SHARDS = [
    (ends_with_the_sum, "shards.sum"),
    (partial(does_both, divisor=1), "server.not_divided"),
    (both_divide_by_ranks, "shards.over_ranks"),
    (partial(does_both, sign=-1), "server.wrong_sign"),
    (partial(does_both, own=0), "shards.unchanged"),
    (partial(everyone_by_turns, pull=False), "shards.own_slice"),
    (partial(everyone_by_turns, own=False), "shards.own_missing"),
    (partial(everyone_by_turns, add=False), "server.last_push_only"),
    (keeps_its_own_slice, "shards.own_old"),
    (everyone_for_itself, "shards.own_gradient"),
    (through_one_rank, "traffic.off_target"),
    (serves_itself_twice, "value.wrong"),
]
ANSWERS = [
    Answers(
        check.parameter_server.push_and_pull,
        [
            pushes_and_pulls,
            pulls_beside,
            pushes_and_pulls_in_numpy,
            pushes_by_keyword,
            pulls_from_any,
            takes_both_ways_as_one,
        ],
        PUSH_AND_PULL,
    ),
    Answers(
        check.parameter_server.one_by_one,
        [
            answers_at_once,
            partial(answers_at_once, order=-1),
            answers_whoever_comes,
            answers_in_numpy,
            answers_the_rest_later,
            answers_by_optimizer,
        ],
        ONE_BY_ONE,
    ),
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
        4,
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
            everyone_by_turns,
        ],
        SHARDS,
    ),
]
