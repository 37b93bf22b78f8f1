"""Answers to ``check.messages``."""

import torch
from graded import Answers, ends
from ranks import travel_by_value

from answers.ring import neighbours
from labkit import collectives
from labkit.costs.link import fit_link
from workbook import check

travel_by_value(__name__)


# there_and_back(comm, mine)


def both_add(comm, mine):
    if comm.rank < 2:
        theirs = torch.empty_like(mine)
        comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank)
        return mine + theirs
    return None


def as_a_list(comm, mine):
    found = both_add(comm, mine)
    return found.tolist() if found is not None else None


def rank_1_forgets_to_add(comm, mine):
    if comm.rank == 0:
        comm.send(mine, 1)
        return comm.recv(mine, 1)
    if comm.rank == 1:
        comm.recv(mine, 0)
        comm.send(mine, 0)
        return mine
    return None


def everyone_but_0_is_rank_1(comm, mine):
    theirs = torch.empty_like(mine)
    if comm.rank == 0:
        comm.send(mine, 1)
        return comm.recv(theirs, 1)
    comm.recv(theirs, 0)
    comm.send(theirs + mine, 0)
    return theirs + mine


# round_trip(comm, mine)


def in_place(comm, mine):
    right, left = neighbours(comm)
    if comm.rank:
        mine += comm.recv(torch.empty_like(mine), left)
    comm.send(mine, right)
    return mine if comm.rank else comm.recv(mine, left)


def sends_its_own(comm, mine):
    right, left = neighbours(comm)
    if comm.rank == 0:
        comm.send(mine, right)
        return comm.recv(torch.empty_like(mine), left)
    came = comm.recv(torch.empty_like(mine), left)
    comm.send(mine, right)
    return came + mine


def all_receive_first(comm, mine):
    right, left = neighbours(comm)
    mine += comm.recv(torch.empty_like(mine), left)
    comm.send(mine, right)
    return mine


# all_gather(comm, mine)


def steps_apart(comm, mine):
    everyone = [mine] * comm.world_size
    for step in range(1, comm.world_size):
        dst, src = ((comm.rank + way * step) % comm.world_size for way in (1, -1))
        everyone[src] = comm.exchange(mine, dst, torch.empty_like(mine), src)
    return everyone


def as_it_stands(comm, mine):
    everyone = [torch.empty_like(mine) for _ in range(comm.world_size)]
    everyone[comm.rank] = mine
    for step in range(1, comm.world_size):
        peer = (comm.rank + step) % comm.world_size
        comm.exchange(mine, peer, everyone[peer], peer)
    return everyone


def others_alone(comm, mine):
    return [one for rank, one in enumerate(steps_apart(comm, mine)) if rank != comm.rank]


def by_the_library(comm, mine):
    return collectives.all_gather(comm, mine)


# message_time(small, large, num_bytes)


def with_the_library_s_fit(small, large, num_bytes):
    return fit_link(*zip(small, large)).message_seconds(num_bytes)


def proportional(small, large, num_bytes):
    return large[1] / large[0] * num_bytes


ANSWERS = [
    Answers(
        check.messages.there_and_back,
        [as_a_list],
        [rank_1_forgets_to_add, ends(everyone_but_0_is_rank_1)],
    ),
    Answers(
        check.messages.round_trip,
        [in_place],
        [sends_its_own, ends(all_receive_first)],
    ),
    Answers(
        check.messages.all_gather,
        [by_the_library],
        [ends(as_it_stands), others_alone],
    ),
    Answers(
        check.messages.message_time,
        [with_the_library_s_fit],
        [proportional, lambda small, large, num_bytes: None],
    ),
]
