"""Answers to ``check.messages``."""

from fractions import Fraction

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from answers.ring import neighbours
from labkit import collectives
from labkit.costs.link import fit_link
from workbook import check

travel_by_value(__name__)


# there_and_back(comm, mine)


def rank_1_adds(comm, mine):
    theirs = torch.empty_like(mine)
    if comm.rank == 0:
        comm.send(mine, 1)
        return comm.recv(theirs, 1)
    if comm.rank == 1:
        comm.recv(theirs, 0)
        theirs += mine
        comm.send(theirs, 0)
        return theirs
    return None


def both_add(comm, mine):
    if comm.rank < 2:
        theirs = torch.empty_like(mine)
        comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank)
        return mine + theirs
    return None


def asks_rank_1_first(comm, mine):
    if comm.rank == 1:
        comm.send(mine.clone(), 0)
        return comm.recv(mine, 0)
    if comm.rank == 0:
        mine += comm.recv(torch.zeros_like(mine), 1)
        comm.send(mine, 1)
        return mine
    return None


def by_keyword(*, mine, comm):
    return rank_1_adds(comm, mine)


def with_numpy(comm, mine):
    if comm.rank > 1:
        return None
    theirs = np.empty(len(mine), dtype=np.float32)
    comm.exchange(mine, 1 - comm.rank, torch.from_numpy(theirs), 1 - comm.rank)
    return theirs + mine.numpy()


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


def receives_over_its_own(comm, mine):
    if comm.rank == 0:
        comm.send(mine, 1)
        return comm.recv(mine, 1)
    if comm.rank == 1:
        theirs = comm.recv(mine, 0)
        mine += theirs
        comm.send(mine, 0)
        return mine
    return None


def rank_0_adds_again(comm, mine):
    found = rank_1_adds(comm, mine)
    return found + mine if comm.rank == 0 else found


def rank_0_does_not_take_the_answer(comm, mine):
    found = rank_1_adds(comm, mine)
    return mine if comm.rank == 0 else found


def all_return(comm, mine):
    found = rank_1_adds(comm, mine)
    return mine if found is None else found


def rank_1_sends_its_own_back(comm, mine):
    theirs = torch.empty_like(mine)
    if comm.rank == 0:
        comm.send(mine, 1)
        return comm.recv(theirs, 1)
    if comm.rank == 1:
        comm.recv(theirs, 0)
        comm.send(mine, 0)
        return mine + theirs
    return None


def rank_1_returns_nothing(comm, mine):
    found = rank_1_adds(comm, mine)
    return found if comm.rank == 0 else None


def all_pairs(comm, mine):
    """Also the ranks that have no part."""
    found = rank_1_adds(comm, mine)
    if comm.rank == 2:
        comm.send(mine, 0)
    if comm.rank == 0 and comm.world_size > 2:
        comm.recv(torch.empty_like(mine), 2)
    return found


def everyone_but_0_is_rank_1(comm, mine):
    theirs = torch.empty_like(mine)
    if comm.rank == 0:
        comm.send(mine, 1)
        return comm.recv(theirs, 1)
    comm.recv(theirs, 0)
    comm.send(theirs + mine, 0)
    return theirs + mine


THERE_AND_BACK = [
    (rank_1_forgets_to_add, "trip.not_added"),
    (receives_over_its_own, "trip.overwritten"),
    (rank_0_adds_again, "sum.own_twice"),
    (rank_0_does_not_take_the_answer, "trip.no_answer"),
    (rank_1_sends_its_own_back, "trip.own_sent", "rank 0 is the first"),
    (all_return, "value.kind", "rank 2 is the first"),
    (rank_1_returns_nothing, "value.kind", "rank 1 is the first"),
    (all_pairs, "peers.wrong", "rank 2 sends to rank 0"),
    (everyone_but_0_is_rank_1, "run.stuck"),
]


# round_trip(comm, mine)


def rank_0_begins(comm, mine):
    right, left = neighbours(comm)
    if comm.rank == 0:
        comm.send(mine, right)
        return comm.recv(torch.empty_like(mine), left)
    total = comm.recv(torch.empty_like(mine), left) + mine
    comm.send(total, right)
    return total


def in_place(comm, mine):
    right, left = neighbours(comm)
    if comm.rank:
        mine += comm.recv(torch.empty_like(mine), left)
    comm.send(mine, right)
    return mine if comm.rank else comm.recv(mine, left)


def from_a_list(comm, mine):
    return rank_0_begins(comm, mine).tolist()


def trip_with_numpy(comm, mine):
    box = np.zeros_like(mine.numpy())
    right, left = neighbours(comm)
    if comm.rank:
        comm.recv(torch.from_numpy(box), left)
    box += mine.numpy()
    comm.send(torch.from_numpy(box), right)
    if not comm.rank:
        comm.recv(torch.from_numpy(box), left)
    return box


def in_steps(comm, mine):
    """In step s rank s sends and the next one receives."""
    held = mine.clone()
    for step in range(comm.world_size):
        after = (step + 1) % comm.world_size
        if comm.rank == step:
            comm.send(held, after)
        if comm.rank == after:
            came = comm.recv(torch.empty_like(mine), step)
            held = came if after == 0 else held + came
    return held


def trip_by_keyword(*, comm, mine):
    return in_place(comm, mine)


def adds_at_home(comm, mine):
    found = rank_0_begins(comm, mine)
    return found if comm.rank else found + mine


def passes_on_what_came(comm, mine):
    right, left = neighbours(comm)
    if comm.rank == 0:
        comm.send(mine, right)
        return comm.recv(torch.empty_like(mine), left)
    came = comm.recv(torch.empty_like(mine), left)
    comm.send(came, right)
    return came


def adds_to_what_overwrote_it(comm, mine):
    right, left = neighbours(comm)
    if comm.rank:
        mine += comm.recv(mine, left)
    comm.send(mine, right)
    return mine if comm.rank else comm.recv(mine, left)


def returns_what_came(comm, mine):
    """What it sends on is right."""
    found = rank_0_begins(comm, mine)
    return found if comm.rank == 0 else found - mine


def adds_the_rank(comm, mine):
    return rank_0_begins(comm, mine) + comm.rank


def sends_its_own(comm, mine):
    right, left = neighbours(comm)
    if comm.rank == 0:
        comm.send(mine, right)
        return comm.recv(torch.empty_like(mine), left)
    came = comm.recv(torch.empty_like(mine), left)
    comm.send(mine, right)
    return came + mine


def to_the_left(comm, mine):
    right, left = neighbours(comm)
    if comm.rank == 0:
        comm.send(mine, left)
        return comm.recv(torch.empty_like(mine), right)
    total = comm.recv(torch.empty_like(mine), right) + mine
    comm.send(total, left)
    return total


def all_receive_first(comm, mine):
    right, left = neighbours(comm)
    mine += comm.recv(torch.empty_like(mine), left)
    comm.send(mine, right)
    return mine


def goes_round_twice(comm, mine):
    rank_0_begins(comm, mine)
    return rank_0_begins(comm, mine)


def stays_at_home(comm, mine):
    """The last rank does not send."""
    if comm.rank == 0:
        comm.send(mine, 1)
        return mine
    total = mine + comm.recv(torch.empty_like(mine), comm.rank - 1)
    if comm.rank < comm.world_size - 1:
        comm.send(total, comm.rank + 1)
    return total


def sums_at_home_alone(comm, mine):
    """All but rank 0 return their own."""
    found = rank_0_begins(comm, mine)
    return mine if comm.rank else found


ROUND_TRIP = [
    (adds_at_home, "sum.own_twice", "rank 0 is the first"),
    (passes_on_what_came, "trip.not_added"),
    (adds_to_what_overwrote_it, "trip.overwritten"),
    (returns_what_came, "trip.what_came"),
    (adds_the_rank, "value.numbers"),
    (sends_its_own, "trip.own_sent", "rank 0 is the first"),
    (stays_at_home, "trip.not_home", "rank 0 is the first"),
    (to_the_left, "value.wrong", "rank 1 is the first"),
    (goes_round_twice, "traffic.doubled"),
    (sums_at_home_alone, "value.one_right", "value.unchanged"),
    (all_receive_first, "run.stuck"),
]


# all_gather(comm, mine)


def steps_apart(comm, mine):
    everyone = [mine] * comm.world_size
    for step in range(1, comm.world_size):
        dst, src = ((comm.rank + way * step) % comm.world_size for way in (1, -1))
        everyone[src] = comm.exchange(mine, dst, torch.empty_like(mine), src)
    return everyone


def one_common_order(comm, mine):
    """Every pair of ranks meets once, all pairs in the same order."""
    everyone = {comm.rank: mine}
    for one in range(comm.world_size):
        for other in range(one):
            if comm.rank in (one, other):
                peer = one + other - comm.rank
                everyone[peer] = comm.exchange(mine, peer, torch.empty_like(mine), peer)
    return [everyone[rank] for rank in range(comm.world_size)]


def around_the_ring(comm, mine):
    right, left = neighbours(comm)
    came = [mine]
    for _ in range(comm.world_size - 1):
        came.append(comm.exchange(came[-1], right, torch.empty_like(mine), left))
    return tuple(came[comm.rank - rank] for rank in range(comm.world_size))


def into_rows(comm, mine):
    rows = mine.repeat(comm.world_size, 1)
    for peer in range(comm.world_size):
        if peer < comm.rank:
            comm.recv(rows[peer], peer)
            comm.send(mine, peer)
        elif peer > comm.rank:
            comm.send(mine, peer)
            comm.recv(rows[peer], peer)
    return rows


def gather_with_numpy(comm, mine):
    return np.stack([tensor.numpy() for tensor in steps_apart(comm, mine)])


def yields(comm, mine):
    yield from around_the_ring(comm, mine)


def as_it_stands(comm, mine):
    everyone = [torch.empty_like(mine) for _ in range(comm.world_size)]
    everyone[comm.rank] = mine
    for step in range(1, comm.world_size):
        peer = (comm.rank + step) % comm.world_size
        comm.exchange(mine, peer, everyone[peer], peer)
    return everyone


def in_the_order_of_arrival(comm, mine):
    found = steps_apart(comm, mine)
    return [found[comm.rank - step] for step in range(comm.world_size)]


def in_reverse(comm, mine):
    found = steps_apart(comm, mine)
    return found[::-1]


def forgets_its_own(comm, mine):
    found = steps_apart(comm, mine)
    found[comm.rank] = torch.zeros_like(mine)
    return found


def one_tensor_for_all(comm, mine):
    everyone = [torch.empty_like(mine)] * comm.world_size
    everyone[comm.rank] = mine
    for step in range(1, comm.world_size):
        dst, src = ((comm.rank + way * step) % comm.world_size for way in (1, -1))
        comm.exchange(mine, dst, everyone[src], src)
    return everyone


def others_alone(comm, mine):
    return [one for rank, one in enumerate(steps_apart(comm, mine)) if rank != comm.rank]


def from_its_neighbours(comm, mine):
    right, left = neighbours(comm)
    theirs = comm.exchange(mine, right, torch.empty_like(mine), left)
    everyone = [torch.zeros_like(mine) for _ in range(comm.world_size)]
    everyone[comm.rank], everyone[left] = mine, theirs
    return everyone


def through_rank_0(comm, mine):
    found = collectives.gather(comm, mine, 0) or [torch.empty_like(mine)] * comm.world_size
    return [collectives.broadcast(comm, tensor.clone(), 0) for tensor in found]


def by_the_library(comm, mine):
    return collectives.all_gather(comm, mine)


ALL_GATHER = [
    (as_it_stands, "run.stuck", "rank 0"),
    (in_the_order_of_arrival, "gather.order"),
    (in_reverse, "value.elsewhere", "not gather.order"),
    (forgets_its_own, "value.zeros"),
    (others_alone, "value.kind"),
    (one_tensor_for_all, "gather.one_buffer"),
    (from_its_neighbours, "value.zeros"),
    (through_rank_0, "traffic.off_target"),
]


# message_time(small, large, num_bytes)


def along_the_line(small, large, num_bytes):
    beta = (large[1] - small[1]) / (large[0] - small[0])
    return small[1] - beta * small[0] + beta * num_bytes


def from_the_large_one(small, large, num_bytes):
    (n, t), (m, u) = small, large
    return u + (t - u) / (n - m) * (num_bytes - m)


def by_weights(small, large, num_bytes):
    share = (num_bytes - small[0]) / (large[0] - small[0])
    return (1 - share) * small[1] + share * large[1]


def by_a_fit(small, large, num_bytes):
    (sizes, times) = zip(small, large)
    beta, alpha = np.polyfit(sizes, times, 1)
    return np.float64(alpha + beta * num_bytes)


def by_a_system(small, large, num_bytes):
    points = torch.tensor([[1, small[0]], [1, large[0]]], dtype=torch.float64)
    line = torch.linalg.solve(points, torch.tensor([small[1], large[1]], dtype=torch.float64))
    return (line * torch.tensor([1, num_bytes])).sum()


def with_fractions(large, num_bytes, small):
    n, t, m, u = map(Fraction, (*small, *large))
    return t + (u - t) * (num_bytes - n) / (m - n)


def with_the_library_s_fit(small, large, num_bytes):
    return fit_link(*zip(small, large)).message_seconds(num_bytes)


def proportional(small, large, num_bytes):
    return large[1] / large[0] * num_bytes


def without_alpha(small, large, num_bytes):
    return (large[1] - small[1]) / (large[0] - small[0]) * num_bytes


def alpha_is_the_small_one(small, large, num_bytes):
    return small[1] + (large[1] - small[1]) / (large[0] - small[0]) * num_bytes


def beta_of_the_large_one(small, large, num_bytes):
    return small[1] + large[1] / large[0] * num_bytes


def bytes_per_time(small, large, num_bytes):
    return num_bytes * (large[0] - small[0]) / (large[1] - small[1])


def upside_down(small, large, num_bytes):
    return num_bytes / without_alpha(small, large, 1)


def both_constants(small, large, num_bytes):
    beta = without_alpha(small, large, 1)
    return small[1] - beta * small[0], beta


MESSAGE_TIME = [
    (proportional, "line.proportional"),
    (without_alpha, "line.no_alpha"),
    (alpha_is_the_small_one, "line.alpha_is_small"),
    (beta_of_the_large_one, "line.beta_of_large"),
    (upside_down, "line.upside_down"),
    (bytes_per_time, "line.upside_down"),
    (both_constants, "answer.wrong"),
    (lambda small, large, num_bytes: None, "answer.nothing"),
]


ANSWERS = [
    Answers(
        check.messages.there_and_back,
        [rank_1_adds, both_add, asks_rank_1_first, by_keyword, with_numpy, as_a_list],
        THERE_AND_BACK,
    ),
    Answers(
        check.messages.round_trip,
        [rank_0_begins, in_place, from_a_list, trip_with_numpy, in_steps, trip_by_keyword],
        ROUND_TRIP,
    ),
    Answers(
        check.messages.all_gather,
        [
            *(steps_apart, one_common_order, around_the_ring, into_rows),
            *(gather_with_numpy, yields, by_the_library),
        ],
        ALL_GATHER,
    ),
    Answers(
        check.messages.message_time,
        [
            *(along_the_line, from_the_large_one, by_weights, by_a_fit, by_a_system),
            *(with_fractions, with_the_library_s_fit),
        ],
        MESSAGE_TIME,
    ),
]
