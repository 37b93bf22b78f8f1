"""Answers to ``check.puzzles``."""

import math
from functools import partial

import torch
from graded import Answers, ends

from labkit import collectives
from workbook import check


def neighbors(comm):
    return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size


# pass_on(comm, tensor)


def last_rank_last(comm, tensor):
    """Even ranks send first, but the last one receives first."""
    (right, left), incoming = neighbors(comm), torch.empty_like(tensor)
    if comm.rank % 2 == 0 and comm.rank < comm.world_size - 1:
        comm.send(tensor, right)
        comm.recv(incoming, left)
    else:
        comm.recv(incoming, left)
        comm.send(tensor, right)
    return incoming


def rank_0_first(comm, tensor):
    (right, left), incoming = neighbors(comm), torch.empty_like(tensor)
    if comm.rank == 0:
        comm.send(tensor, right)
    comm.recv(incoming, left)
    if comm.rank:
        comm.send(tensor, right)
    return incoming


def by_exchange(comm, tensor):
    right, left = neighbors(comm)
    return comm.exchange(tensor, right, torch.empty_like(tensor), left)


def all_send_first(comm, tensor):
    right, left = neighbors(comm)
    comm.send(tensor, right)
    return comm.recv(torch.empty_like(tensor), left)


# same_bits(comm, tensor)


def exact_up_rounded_down(comm, tensor):
    total = tensor.double().sum()
    if comm.rank:
        comm.send(total, 0)
        return comm.recv(torch.empty(()), 0)
    for rank in range(1, comm.world_size):
        total += comm.recv(torch.empty_like(total), rank)
    for rank in range(1, comm.world_size):
        comm.send(total.float(), rank)
    return total.float()


def exact_both_ways(comm, tensor):
    return collectives.naive_all_reduce(comm, tensor.double().sum().view(1)).item()


# broadcast(comm, tensor)


def by_doubling(comm, tensor):
    know = 1
    while know < comm.world_size:
        if comm.rank < know and comm.rank + know < comm.world_size:
            comm.send(tensor, comm.rank + know)
        elif know <= comm.rank < 2 * know:
            comm.recv(tensor, comm.rank - know)
        know *= 2
    return tensor


def by_bits(comm, tensor):
    """A rank hears from the one without its highest bit."""
    begin = comm.rank.bit_length()
    if comm.rank:
        comm.recv(tensor, comm.rank ^ 1 << begin - 1)
    for bit in range(begin, comm.world_size.bit_length()):
        if comm.rank | 1 << bit < comm.world_size:
            comm.send(tensor, comm.rank | 1 << bit)
    return tensor


def root_tells_all(comm, tensor):
    if comm.rank:
        return comm.recv(tensor, 0)
    for rank in range(1, comm.world_size):
        comm.send(tensor, rank)
    return tensor


# prefix_sum(comm, tensor)


def hillis_steele(comm, tensor):
    total, distance = tensor.clone(), 1
    while distance < comm.world_size:
        before, after = comm.rank - distance, comm.rank + distance
        incoming = torch.zeros_like(total)
        if before >= 0 and after < comm.world_size:
            comm.exchange(total, after, incoming, before)
        elif before >= 0:
            comm.recv(incoming, before)
        elif after < comm.world_size:
            comm.send(total, after)
        total += incoming
        distance *= 2
    return total


def prefix_in_a_row(comm, tensor):
    if comm.rank:
        tensor += comm.recv(torch.empty_like(tensor), comm.rank - 1)
    if comm.rank < comm.world_size - 1:
        comm.send(tensor, comm.rank + 1)
    return tensor


def stops_after_one_step(comm, tensor):
    left = by_exchange(comm, tensor)
    return tensor + left if comm.rank else tensor


# all_gather(comm, tensor)


def bruck(comm, tensor):
    P, rank, have = comm.world_size, comm.rank, [tensor]
    while len(have) < P:
        distance, count = len(have), min(len(have), P - len(have))
        incoming = torch.empty(count, len(tensor))
        dst, src = (rank - distance) % P, (rank + distance) % P
        have += comm.exchange(torch.stack(have[:count]), dst, incoming, src)
    return [have[(r - rank) % P] for r in range(P)]


# long_broadcast(comm, tensor)


def through_a_chain(comm, segments):
    before, after = comm.rank - 1, comm.rank + 1
    last = after == comm.world_size
    for number, segment in enumerate(segments):
        if comm.rank == 0:
            comm.send(segment, after)
        elif last or number == 0:
            comm.recv(segment, before)
        else:
            comm.exchange(segments[number - 1], after, segment, before)
    if comm.rank and not last:
        comm.send(segments[-1], after)


def best_number(comm, tensor):
    return max(1, round(math.sqrt((comm.world_size - 2) * tensor.nbytes / 1000)))


def in_segments(comm, tensor):
    through_a_chain(comm, tensor.tensor_split(best_number(comm, tensor)))


# reduce_blocks(comm, blocks)


def by_halving(comm, blocks):
    P, rank = comm.world_size, comm.rank
    mine = blocks.roll(-rank, 0)  # row i is the block of rank + i
    while len(mine) > 1:
        keep = (len(mine) + 1) // 2
        leaving = mine[keep:]
        incoming = torch.empty_like(leaving)
        comm.exchange(leaving, (rank + keep) % P, incoming, (rank - keep) % P)
        mine = mine[:keep].clone()
        mine[: len(incoming)] += incoming
    return mine[0]


# all_reduce(comm, tensor)


def in_census(comm, tensor):
    P, rank = comm.world_size, comm.rank
    before, count = torch.zeros_like(tensor), 0  # the sum over the count ranks before this one
    for bit in map(int, f"{P - 1:b}"):
        distance = count + bit
        sent = before + tensor if bit else before
        incoming = torch.empty_like(tensor)
        comm.exchange(sent, (rank + distance) % P, incoming, (rank - distance) % P)
        before = before + incoming
        count += distance
    return before + tensor


def by_folding(comm, tensor):
    """Recursive doubling on the largest power of two; the other ranks go before and after."""
    P, rank = comm.world_size, comm.rank
    power = 1 << P.bit_length() - 1
    if rank >= power:
        comm.send(tensor, rank - power)
        return comm.recv(tensor, rank - power)
    if rank + power < P:
        tensor += comm.recv(torch.empty_like(tensor), rank + power)
    for bit in range(power.bit_length() - 1):
        peer = rank ^ 1 << bit
        tensor = tensor + comm.exchange(tensor, peer, torch.empty_like(tensor), peer)
    if rank + power < P:
        comm.send(tensor, rank + power)
    return tensor


def doubles_around_the_circle(comm, tensor):
    """Right for powers of two; elsewhere some ranks count twice."""
    for step in range(math.ceil(math.log2(comm.world_size))):
        dst, src = comm.rank + 2**step, comm.rank - 2**step
        incoming = torch.empty_like(tensor)
        comm.exchange(tensor, dst % comm.world_size, incoming, src % comm.world_size)
        tensor = tensor + incoming
    return tensor


# all_to_all(comm, blocks)


def by_binary_digits(comm, blocks):
    """Bruck's: a block travels by the binary digits of its way."""
    P, rank = comm.world_size, comm.rank
    held, distance = blocks.roll(-rank, 0), 1
    while distance < P:
        rows = [row for row in range(P) if row & distance]
        incoming = torch.empty_like(held[rows])
        comm.exchange(held[rows], (rank + distance) % P, incoming, (rank - distance) % P)
        held[rows] = incoming
        distance *= 2
    return held.flip(0).roll(rank + 1, 0)


def pair_by_pair(comm, blocks):
    P, rank, found = comm.world_size, comm.rank, torch.empty_like(blocks)
    found[rank] = blocks[rank]
    for step in range(1, P):
        dst, src = (rank + step) % P, (rank - step) % P
        comm.exchange(blocks[dst], dst, found[src], src)
    return found


def pair_by_pair_of_copies(comm, tensor):
    return list(pair_by_pair(comm, tensor.repeat(comm.world_size, 1)))


def pair_by_pair_then_adds(comm, blocks):
    return pair_by_pair(comm, blocks).sum(0)


# recompute(comm, forward, backward, first, gradient)


SHRINKING = 0, 11, 21, 30, 38, 45, 51, 56, 60


def recomputes(comm, forward, backward, first, gradient, begins=SHRINKING):
    x, kept = first, {0: first}
    for layer in range(begins[-1]):
        x = forward(layer, x)
        if layer + 1 in begins:
            kept[layer + 1] = x
    del x
    for begin, end in reversed([*zip(begins, [*begins[1:], 64])]):
        inputs = [kept.pop(begin)]
        for layer in range(begin, end - 1):
            inputs.append(forward(layer, inputs[-1]))
        for layer in reversed(range(begin, end)):
            gradient = backward(layer, inputs.pop(), gradient)
    return gradient


def from_the_start(comm, forward, backward, first, gradient):
    for layer in reversed(range(64)):
        x = first
        for before in range(layer):
            x = forward(before, x)
        gradient = backward(layer, x, gradient)
    return gradient


def from_the_first_to_the_last(comm, forward, backward, first, gradient):
    for layer in range(64):
        gradient = backward(layer, first, gradient)
        first = forward(layer, first)
    return gradient


ANSWERS = [
    Answers(
        check.puzzles.all_to_all,
        [by_binary_digits],
        [pair_by_pair],
        on=4,
    ),
    Answers(
        check.puzzles.recompute,
        [recomputes],
        [
            partial(recomputes, begins=range(0, 64, 8)),
            ends(from_the_start),
            ends(from_the_first_to_the_last),
        ],
    ),
    Answers(
        check.puzzles.pass_on,
        [last_rank_last],
        [rank_0_first, by_exchange, ends(all_send_first)],
        on=6,
    ),
    Answers(
        check.puzzles.same_bits,
        [exact_up_rounded_down],
        [exact_both_ways, lambda comm, tensor: tensor.double().sum().item()],
        on=6,
    ),
    Answers(check.puzzles.broadcast, [by_bits], [root_tells_all], on=8),
    Answers(
        check.puzzles.prefix_sum, [hillis_steele], [prefix_in_a_row, stops_after_one_step], on=6
    ),
    Answers(
        check.puzzles.all_gather,
        [bruck],
        [pair_by_pair_of_copies, lambda comm, tensor: bruck(comm, tensor)[::-1]],
        on=6,
    ),
    Answers(check.puzzles.long_broadcast, [in_segments], [by_doubling], on=6),
    Answers(
        check.puzzles.reduce_blocks,
        [by_halving],
        [pair_by_pair_then_adds],
        on=6,
    ),
    Answers(check.puzzles.all_reduce, [in_census], [by_folding, doubles_around_the_circle], on=6),
]
