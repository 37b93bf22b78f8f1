"""Answers to ``check.messages``."""

import torch
from graded import Answers, ends

from answers.ring import neighbors
from labkit import collectives
from labkit.costs.link import fit_link
from workbook import check

# there_and_back(comm, mine)


def as_a_list(comm, mine):
    if comm.rank > 1:
        return None
    theirs = comm.exchange(mine, 1 - comm.rank, torch.empty_like(mine), 1 - comm.rank)
    return (mine + theirs).tolist()


def rank_1_forgets_to_add(comm, mine):
    if comm.rank == 0:
        comm.send(mine, 1)
        comm.recv(mine, 1)
    elif comm.rank == 1:
        comm.recv(mine, 0)
        comm.send(mine, 0)
    return mine if comm.rank < 2 else None


def everyone_but_0_is_rank_1(comm, mine):
    theirs = torch.empty_like(mine)
    if comm.rank == 0:
        comm.send(mine, 1)
        return comm.recv(theirs, 1)
    comm.recv(theirs, 0)
    comm.send(theirs + mine, 0)
    return theirs + mine


# round_trip(comm, mine)


def in_place(comm, mine, passed_on=lambda own, total: total):
    right, left = neighbors(comm)
    own = mine.clone()
    if comm.rank:
        mine += comm.recv(torch.empty_like(mine), left)
    comm.send(passed_on(own, mine), right)
    return mine if comm.rank else comm.recv(mine, left)


def sends_its_own(comm, mine):
    return in_place(comm, mine, lambda own, total: own)


def never_comes_home(comm, mine):
    found = in_place(comm, mine)
    return found if comm.rank else found * 0


def all_receive_first(comm, mine):
    right, left = neighbors(comm)
    mine += comm.recv(torch.empty_like(mine), left)
    comm.send(mine, right)
    return mine


# all_gather(comm, mine)


def steps_apart(comm, mine, filled=torch.empty_like, both_ways=True):
    everyone = [filled(mine) for _ in range(comm.world_size)]
    everyone[comm.rank] = mine
    for step in range(1, comm.world_size):
        dst, src = ((comm.rank + way * step) % comm.world_size for way in (1, -1))
        comm.exchange(mine, dst, everyone[src], src if both_ways else dst)
    return everyone


def into_one_buffer(comm, mine):
    buffer = torch.empty_like(mine)
    return steps_apart(comm, mine, lambda tensor: buffer)


def receives_where_it_sends(comm, mine):
    return steps_apart(comm, mine, both_ways=False)


def others_alone(comm, mine):
    return [one for rank, one in enumerate(steps_apart(comm, mine)) if rank != comm.rank]


def by_the_library(comm, mine):
    return collectives.all_gather(comm, mine)


# message_time(small, large, num_bytes)


def with_the_library_s_fit(small, large, num_bytes):
    return fit_link(*zip(small, large)).message_seconds(num_bytes)


ANSWERS = [
    Answers(
        check.messages.there_and_back,
        [as_a_list],
        [rank_1_forgets_to_add, ends(everyone_but_0_is_rank_1)],
    ),
    Answers(
        check.messages.round_trip,
        [in_place],
        [sends_its_own, never_comes_home, ends(all_receive_first)],
    ),
    Answers(
        check.messages.all_gather,
        [by_the_library],
        [into_one_buffer, ends(receives_where_it_sends), others_alone],
    ),
    Answers(
        check.messages.message_time,
        [with_the_library_s_fit],
        [
            lambda small, large, num_bytes: large[1] / large[0] * num_bytes,
            lambda small, large, num_bytes: small[1] + large[1] / large[0] * num_bytes,
        ],
    ),
]
