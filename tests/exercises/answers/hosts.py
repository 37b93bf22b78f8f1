"""Answers to ``check.hosts``."""

import torch
from graded import Answers, ends

from labkit.collectives import fast_ring_all_reduce, ring_all_reduce
from labkit.engine.comm.comm import SubComm
from workbook import check

# inside(comm, chunks, host)


def inside(comm, chunks, host):
    for owner, chunk in zip(host, chunks):
        if comm.rank != owner:
            comm.send(chunk, owner)
            continue
        for other in host:
            if other != owner:
                chunk += comm.recv(torch.empty_like(chunk), other)


def inside_in_a_circle(comm, chunks, host):
    for owner, chunk in zip(host, chunks):
        inside(comm, [chunk], (owner, *(rank for rank in host if rank != owner)))


def inside_overwrites(comm, chunks, host):
    for owner, chunk in zip(host, chunks):
        if comm.rank != owner:
            comm.send(chunk, owner)
        for other in host if comm.rank == owner else ():
            if other != owner:
                comm.recv(chunk, other)


def inside_all_send_first(comm, chunks, host):
    for owner, chunk in zip(host, chunks):
        for other in set(host) - {comm.rank}:
            comm.send(chunk, other)
        if comm.rank == owner:
            chunk += comm.recv(torch.empty_like(chunk), host[0])


# between hosts, for all_reduce


def between(comm, chunk, peers):
    around(comm, chunk, peers, peers.index(comm.rank))


def around(comm, chunk, peers, place):
    H = len(peers)
    dst, src = peers[(place + 1) % H], peers[(place - 1) % H]
    pieces = chunk.tensor_split(H)
    for step in range(H - 1):
        target = pieces[(place - step - 1) % H]
        incoming = torch.empty_like(target)
        comm.exchange(pieces[(place - step) % H], dst, incoming, src)
        target += incoming
    for step in range(H - 1):
        sent, received = (place + 1 - step) % H, (place - step) % H
        comm.exchange(pieces[sent], dst, pieces[received], src)


# all_reduce(comm, tensor, hosts)


def share_inside(comm, chunks, host):
    for owner, chunk in zip(host, chunks):
        if comm.rank != owner:
            comm.recv(chunk, owner)
            continue
        for other in host:
            if other != owner:
                comm.send(chunk, other)


def over_hosts(comm, tensor, hosts, steps=(inside, between, share_inside)):
    first, second, last = steps
    host = next(host for host in hosts if comm.rank in host)
    chunks = tensor.view(-1).tensor_split(min(map(len, hosts)))
    place = host.index(comm.rank)
    first(comm, chunks, host)
    if place < len(chunks):
        second(comm, chunks[place], [other[place] for other in hosts])
    last(comm, chunks, host)


def as_on_the_page(comm, tensor, hosts):
    over_hosts(comm, tensor, hosts)


def with_labkit_s_ring_between(comm, tensor, hosts):
    def ring(comm, chunk, peers):
        ring_all_reduce(SubComm(comm, peers), chunk)

    over_hosts(comm, tensor, hosts, (inside, ring, share_inside))


def around_all_ranks(comm, tensor, hosts):
    between(comm, tensor, list(range(comm.world_size)))


def forgets_the_others_at_home(comm, tensor, hosts):
    over_hosts(comm, tensor, hosts, (lambda *args: None, between, share_inside))


# local_sgd(comm, weight, gradient_of, steps, every)


def local_sgd(comm, weight, gradient_of, steps, every):
    for step in range(steps):
        weight -= 0.1 * gradient_of(weight, step)
        if (step + 1) % every == 0 or step + 1 == steps:
            ring_all_reduce(comm, weight, "mean")


def as_explained(comm, weight, gradient_of, steps, every):
    local_sgd(comm, weight, gradient_of, steps, every)


def round_by_round(comm, weight, gradient_of, steps, every):
    for first in range(0, steps, every):
        for step in range(first, min(first + every, steps)):
            weight.sub_(gradient_of(weight, step), alpha=0.1)
        fast_ring_all_reduce(comm, weight)
        weight /= comm.world_size


def leaves_the_last_steps(comm, weight, gradient_of, steps, every):
    whole = steps - steps % every
    local_sgd(comm, weight, gradient_of, whole, every)
    for step in range(whole, steps):
        weight -= 0.1 * gradient_of(weight, step)


def averages_once_more(comm, weight, gradient_of, steps, every):
    """The right weights, with an all-reduce too many where ``every`` divides ``steps``."""
    local_sgd(comm, weight, gradient_of, steps, every)
    if steps % every == 0:
        ring_all_reduce(comm, weight, "mean")


def averages_before_the_first_step_too(comm, weight, gradient_of, steps, every):
    ring_all_reduce(comm, weight, "mean")
    local_sgd(comm, weight, gradient_of, steps, every)


def counts_steps_from_0(comm, weight, gradient_of, steps, every):
    for step in range(steps):
        weight -= 0.1 * gradient_of(weight, step)
        if step % every == 0 or step + 1 == steps:
            ring_all_reduce(comm, weight, "mean")


def averages_gradients(comm, weight, gradient_of, steps, every):
    for step in range(steps):
        gradient = gradient_of(weight, step)
        if (step + 1) % every == 0 or step + 1 == steps:
            ring_all_reduce(comm, gradient, "mean")
        weight -= 0.1 * gradient


ANSWERS = [
    Answers(
        check.hosts.inside,
        [inside_in_a_circle],
        [inside_overwrites, ends(inside_all_send_first)],
        on=4,
    ),
    Answers(
        check.hosts.all_reduce,
        [as_on_the_page, with_labkit_s_ring_between],
        [around_all_ranks, forgets_the_others_at_home],
        on=4,
    ),
    Answers(
        check.hosts.local_sgd,
        [as_explained, round_by_round],
        [
            *(leaves_the_last_steps, averages_before_the_first_step_too),
            *(averages_gradients, counts_steps_from_0, averages_once_more),
        ],
    ),
]
