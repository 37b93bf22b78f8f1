"""Checks by mutation: each accepts its reference, and names the mistake in each wrong answer."""

import re
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from graded import default_sizes, in_shared_runs
from ranks import travel_by_value

from labkit import check, collectives
from labkit.check.grading import runs
from labkit.check.grading.contents import contents, name_mistake
from labkit.check.grading.exercise import Case
from labkit.collectives.ring import split_chunks

travel_by_value(__name__)


def neighbours(comm):
    return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size


# Wrong answers to share_reduce(comm, chunks)


def overwrites(comm, chunks):
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        chunk = (comm.rank - step) % comm.world_size
        comm.exchange(chunks[chunk], right, chunks[chunk - 1], left)


def reduces_in(comm, chunks, steps, first=0):
    right, left = neighbours(comm)
    for step in range(steps):
        chunk = (comm.rank + first - step) % comm.world_size
        incoming = torch.empty_like(chunks[chunk - 1])
        comm.exchange(chunks[chunk], right, incoming, left)
        chunks[chunk - 1] += incoming


def one_step_short(comm, chunks):
    reduces_in(comm, chunks, comm.world_size - 2)


def one_step_more(comm, chunks):
    reduces_in(comm, chunks, comm.world_size)


def owns_its_own_number(comm, chunks):
    reduces_in(comm, chunks, comm.world_size - 1, first=-1)


def goes_left(comm, chunks):
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        outgoing = chunks[(comm.rank + step) % comm.world_size]
        target = chunks[(comm.rank + step + 1) % comm.world_size]
        incoming = torch.empty_like(target)
        comm.exchange(outgoing, left, incoming, right)
        target += incoming


def sends_the_wrong_chunk(comm, chunks):
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        target = chunks[(comm.rank - step - 1) % comm.world_size]
        incoming = torch.zeros_like(chunks[(comm.rank - step) % comm.world_size])
        comm.exchange(chunks[(comm.rank - step + 1) % comm.world_size], right, incoming, left)
        n = min(target.numel(), incoming.numel())
        target[:n] += incoming[:n]


def sends_the_whole_tensor(comm, chunks):
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        target = (comm.rank - step - 1) % comm.world_size
        incoming = torch.empty(sum(map(len, chunks)))
        comm.exchange(torch.cat(chunks), right, incoming, left)
        chunks[target] += incoming.split([len(chunk) for chunk in chunks])[target]


def sends_then_receives(comm, chunks):
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        chunk = (comm.rank - step) % comm.world_size
        incoming = torch.empty_like(chunks[chunk - 1])
        if comm.rank % 2 == 0:
            comm.send(chunks[chunk], right)
            comm.recv(incoming, left)
        else:
            comm.recv(incoming, left)
            comm.send(chunks[chunk], right)
        chunks[chunk - 1] += incoming


def all_receive_first(comm, chunks):
    right, left = neighbours(comm)
    comm.recv(torch.empty_like(chunks[comm.rank - 1]), left)
    comm.send(chunks[comm.rank], right)


def puts_new_tensors_into_the_list(comm, chunks):
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        chunk = (comm.rank - step) % comm.world_size
        target = (chunk - 1) % comm.world_size
        incoming = torch.empty_like(chunks[target])
        comm.exchange(chunks[chunk], right, incoming, left)
        chunks[target] = chunks[target] + incoming


def divides_its_chunk(comm, chunks):
    collectives.share_reduce(comm, chunks)
    chunks[(comm.rank + 1) % comm.world_size] /= comm.world_size


SHARE_REDUCE = [
    (overwrites, "overwritten instead of added: it holds rank 1's values alone"),
    (one_step_short, "one step too few"),
    (one_step_more, "one step too many"),
    (owns_its_own_number, "chunk 0 is complete there, where chunk 1 should be"),
    (goes_left, "that is the left neighbour, where the right one is due"),
    (sends_the_wrong_chunk, "wrong chunk sent, or received"),
    (sends_the_whole_tensor, "the whole tensor is sent in each message, where a chunk is due"),
    (sends_then_receives, "comm.exchange does both at once"),
    (all_receive_first, "rank 0 -> rank 3 -> rank 2 -> rank 1 -> rank 0, each waits"),
    (puts_new_tensors_into_the_list, "they are new tensors"),
    (divides_its_chunk, "divided by 4: it is the mean, where the sum is due"),
]


# Wrong answers to share_only(comm, chunks)


def passes_on(comm, chunks, steps, first=1):
    right, left = neighbours(comm)
    for step in range(steps):
        chunk = (comm.rank + first - step) % comm.world_size
        comm.exchange(chunks[chunk], right, chunks[chunk - 1], left)


def adds_to_what_is_there(comm, chunks):
    reduces_in(comm, chunks, comm.world_size - 1, first=1)


def one_copy_short(comm, chunks):
    passes_on(comm, chunks, comm.world_size - 2)


def starts_with_an_unfinished_chunk(comm, chunks):
    passes_on(comm, chunks, comm.world_size - 1, first=0)


def copies_to_the_left(comm, chunks):
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        mine = chunks[(comm.rank + 1 + step) % comm.world_size]
        theirs = chunks[(comm.rank + 2 + step) % comm.world_size]
        comm.exchange(mine, left, theirs, right)


def copies_the_whole_tensor(comm, chunks):
    right, left = neighbours(comm)
    whole = torch.cat(chunks)
    sizes = [len(chunk) for chunk in chunks]
    for step in range(comm.world_size - 1):
        incoming = torch.empty_like(whole)
        comm.exchange(whole, right, incoming, left)
        target = (comm.rank - step) % comm.world_size
        chunks[target].copy_(incoming.split(sizes)[target])
        whole = incoming


def puts_received_tensors_into_the_list(comm, chunks):
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        chunk = (comm.rank + 1 - step) % comm.world_size
        target = (chunk - 1) % comm.world_size
        incoming = torch.empty_like(chunks[target])
        chunks[target] = comm.exchange(chunks[chunk], right, incoming, left)


def does_nothing(comm, chunks):
    pass


def stores_one_place_too_far(comm, chunks):
    collectives.share_only(comm, chunks)
    whole = torch.cat([chunks[-1], *chunks[:-1]])
    for chunk, moved in zip(chunks, whole.split([len(chunk) for chunk in chunks])):
        chunk.copy_(moved)


SHARE_ONLY = [
    (adds_to_what_is_there, "added to the rank's own values, where they should be overwritten"),
    (one_copy_short, "unchanged: it still holds the rank's own values"),
    (starts_with_an_unfinished_chunk, "in chunk 0: unchanged"),
    (copies_to_the_left, "that is the left neighbour, where the right one is due"),
    (copies_the_whole_tensor, "the whole tensor is sent in each message"),
    (puts_received_tensors_into_the_list, "write into them (+=, .copy_, recv)"),
    (does_nothing, "nothing was sent"),
    (stores_one_place_too_far, "it holds what belongs in chunk 3: the numbers are rotated by 3"),
]


# Wrong answers to all_reduce(comm, tensor), around the ring


def adds_its_own_again(comm, tensor):
    own = tensor.clone()
    collectives.ring_all_reduce(comm, tensor)
    tensor += own


def forgets_the_second_half(comm, tensor):
    collectives.share_reduce(comm, split_chunks(tensor, comm.world_size))


def stops_the_second_half_early(comm, tensor):
    chunks = split_chunks(tensor, comm.world_size)
    collectives.share_reduce(comm, chunks)
    one_copy_short(comm, chunks)


def rotates_and_adds(comm, tensor):
    right, left = neighbours(comm)
    passing = tensor.clone()
    for _ in range(comm.world_size - 1):
        incoming = torch.empty_like(tensor)
        comm.exchange(passing, right, incoming, left)
        tensor += incoming
        passing = incoming


def goes_through_rank_0(comm, tensor):
    collectives.naive_all_reduce(comm, tensor)


def returns_a_new_tensor(comm, tensor):
    return collectives.ring_all_reduce(comm, tensor.clone())


def binds_the_name_anew(comm, tensor):
    tensor = collectives.ring_all_reduce(comm, tensor.clone())


def takes_the_mean(comm, tensor):
    collectives.ring_all_reduce(comm, tensor, "mean")


def drops_the_remainder(comm, tensor):
    size = tensor.numel() // comm.world_size
    chunks = [tensor[size * c : size * (c + 1)] for c in range(comm.world_size)]
    collectives.share_reduce(comm, chunks)
    collectives.share_only(comm, chunks)


def uses_torch_chunk(comm, tensor):
    chunks = tensor.chunk(comm.world_size)
    chunks[comm.world_size - 1]
    collectives.ring_all_reduce(comm, tensor)


def reduces_from_uninitialised_memory(comm, tensor):
    collectives.ring_all_reduce(comm, tensor)
    tensor += torch.full_like(tensor, torch.nan)


def works_in_float16(comm, tensor):
    half = tensor.half()
    collectives.ring_all_reduce(comm, half)
    tensor.copy_(half)


RING = [
    (works_in_float16, "the right values, but rounded: are they held in 16 bits?"),
    (adds_its_own_again, "the rank's own values are added twice"),
    (forgets_the_second_half, "in chunk 0: unchanged"),
    (stops_the_second_half_early, "and lacks rank 1 (one step too few?)"),
    (rotates_and_adds, "the same sum but for the last bits"),
    (goes_through_rank_0, "all send to rank 0, which becomes the bottleneck"),
    (returns_a_new_tensor, "what it returned is right, but the tensor it was given is not"),
    (binds_the_name_anew, "unchanged: it still holds the rank's own values"),
    (takes_the_mean, "divided by 4: it is the mean, where the sum is due"),
    (drops_the_remainder, "10 does not divide by 4"),
    (uses_torch_chunk, "raised IndexError: tuple index out of range"),
    (reduces_from_uninitialised_memory, "NaN or infinity"),
]


# Wrong answers to all_reduce(comm, tensor), through rank 0


def through_rank_0(comm, tensor, *, first=1, add=True, back=True):
    if comm.rank == 0:
        incoming = torch.empty_like(tensor)
        for src in range(first, comm.world_size):
            comm.recv(incoming, src)
            tensor.copy_(tensor + incoming if add else incoming)
        for dst in range(first, comm.world_size if back else 0):
            comm.send(tensor, dst)
    else:
        comm.send(tensor, 0)
        if back:
            comm.recv(tensor, 0)


def never_sends_back(comm, tensor):
    through_rank_0(comm, tensor, back=False)


def keeps_only_what_came_last(comm, tensor):
    through_rank_0(comm, tensor, add=False)


def forgets_rank_1(comm, tensor):
    through_rank_0(comm, tensor, first=2)


def rank_0_forgets_itself(comm, tensor):
    if comm.rank == 0:
        tensor.zero_()
    through_rank_0(comm, tensor)


def adds_what_comes_back(comm, tensor):
    own = tensor.clone()
    through_rank_0(comm, tensor)
    if comm.rank:
        tensor += own


def everyone_to_everyone(comm, tensor):
    own = tensor.clone()
    for step in range(1, comm.world_size):
        incoming = torch.empty_like(tensor)
        dst, src = (comm.rank + step) % comm.world_size, (comm.rank - step) % comm.world_size
        comm.exchange(own, dst, incoming, src)
        tensor += incoming


def goes_around_the_ring(comm, tensor):
    collectives.ring_all_reduce(comm, tensor)


def sends_back_twice(comm, tensor):
    through_rank_0(comm, tensor)
    through_rank_0(comm, tensor.clone())


NAIVE = [
    (never_sends_back, "Rank 0 alone has the right result"),
    (keeps_only_what_came_last, "overwritten instead of added: it holds rank 3's values alone"),
    (forgets_rank_1, "rank 0 has returned and never came: rank 1 waits for it"),
    (rank_0_forgets_itself, "the rank's own values are missing from the sum"),
    (adds_what_comes_back, "rank 1 is the first that is wrong: the rank's own values are added"),
    (everyone_to_everyone, "messages: with 4 ranks and 96 elements: 3, where 3 1 1 1 is"),
    (goes_around_the_ring, "rank 1 sends to rank 2; allowed: 0"),
    (sends_back_twice, "twice as many as needed"),
]


# Wrong answers to all_reduce(comm, tensor), by recursive doubling


def doubles(comm, tensor, rounds, peer_of, *, add=True):
    for round_ in range(rounds):
        incoming = torch.empty_like(tensor)
        peer = peer_of(comm.rank, round_)
        comm.exchange(tensor, peer, incoming, peer)
        tensor.copy_(tensor + incoming if add else incoming)


def stops_after_one_round(comm, tensor):
    doubles(comm, tensor, 1, lambda rank, k: rank ^ 1)


def keeps_its_first_partner(comm, tensor):
    doubles(comm, tensor, 2, lambda rank, k: rank ^ 1)


def one_round_more(comm, tensor):
    doubles(comm, tensor, 3, lambda rank, k: rank ^ (1, 2, 1)[k])


def swaps_and_does_not_add(comm, tensor):
    doubles(comm, tensor, 2, lambda rank, k: rank ^ 2**k, add=False)


def sends_its_own_each_time(comm, tensor):
    own = tensor.clone()
    for peer in (comm.rank ^ 1, comm.rank ^ 2):
        incoming = torch.empty_like(tensor)
        comm.exchange(own, peer, incoming, peer)
        tensor += incoming


def counts_up_instead_of_flipping(comm, tensor):
    doubles(comm, tensor, 2, lambda rank, k: (rank + 2**k) % comm.world_size)


def lower_rank_sends_first(comm, tensor):
    for peer in (comm.rank ^ 1, comm.rank ^ 2):
        own, incoming = tensor.clone(), torch.empty_like(tensor)
        if comm.rank < peer:
            comm.send(own, peer)
            comm.recv(incoming, peer)
        else:
            comm.recv(incoming, peer)
            comm.send(own, peer)
        tensor += incoming


def adds_itself(comm, tensor):
    doubles(comm, tensor.clone(), 2, lambda rank, k: rank ^ 2**k)
    for _ in range(2):
        tensor += tensor


def tries_each_distance(comm, tensor):
    doubles(comm, tensor, comm.world_size // 2, lambda rank, k: rank ^ (k + 1))


def leaves_ten_numbers_alone(comm, tensor):
    if len(tensor) != 10:
        collectives.tree_all_reduce(comm, tensor)


TREE = [
    (adds_itself, "it is 4 x rank 0, where rank 0 + rank 1 + rank 2 + rank 3 is due"),
    (leaves_ten_numbers_alone, "96 elements came out right; here there are 10"),
    (stops_after_one_round, "partial sum: it holds rank 0 + rank 1, and lacks ranks 2 and 3"),
    (keeps_its_first_partner, "2 x rank 0 + 2 x rank 1, where"),
    (one_round_more, "one step too many"),
    (swaps_and_does_not_add, "overwritten instead of added: it holds rank 3's values alone"),
    (sends_its_own_each_time, "it holds rank 0 + rank 1 + rank 2, and lacks rank 3"),
    (counts_up_instead_of_flipping, "deadlock"),
    (lower_rank_sends_first, "comm.exchange does both at once"),
    (goes_through_rank_0, "all send to rank 0, which becomes the bottleneck"),
    (goes_around_the_ring, "6, where 2 is the target"),
]


# Wrong answers to broadcast(comm, tensor, root)


def sends_to_each(comm, tensor, root):
    if comm.rank == root:
        for dst in range(comm.world_size):
            if dst != root:
                comm.send(tensor, dst)
    else:
        comm.recv(tensor, root)


def always_from_rank_0(comm, tensor, root):
    sends_to_each(comm, tensor, 0)


def only_the_next_rank(comm, tensor, root):
    after = (root + 1) % comm.world_size
    if comm.rank == root:
        comm.send(tensor, after)
    elif comm.rank == after:
        comm.recv(tensor, root)


def around_and_back_to_the_root(comm, tensor, root):
    right, left = neighbours(comm)
    if comm.rank == root:
        comm.send(tensor, right)
        comm.recv(tensor, left)
    else:
        comm.recv(tensor, left)
        comm.send(tensor, right)


def adds_the_broadcast(comm, tensor, root):
    own = tensor.clone()
    sends_to_each(comm, tensor, root)
    if comm.rank != root:
        tensor += own


def returns_what_it_received(comm, tensor, root):
    mine = tensor.clone()
    sends_to_each(comm, mine, root)
    return mine


def nobody_receives(comm, tensor, root):
    if comm.rank == root:
        comm.send(tensor, (root + 1) % comm.world_size)


def knows_rank_0_only(comm, tensor, root):
    if comm.rank == 0:
        for dst in range(1, comm.world_size):
            comm.send(tensor, dst)
    else:
        comm.recv(tensor, root)


def garbles_the_end(comm, tensor, root):
    collectives.broadcast(comm, tensor, root)
    tensor[48:] = tensor[48:].cos()


BROADCAST = [
    (garbles_the_end, "from index 48 on it has ["),
    (always_from_rank_0, "root 1, rank 0 is the first that is wrong: unchanged"),
    (only_the_next_rank, "rank 2 is the first that is wrong: unchanged"),
    (around_and_back_to_the_root, "one message too many"),
    (adds_the_broadcast, "added to the rank's own values, where they should be overwritten"),
    (returns_what_it_received, "what it returned is right, but the tensor it was given is not"),
    (nobody_receives, "rank 1 has returned and never came: rank 0 waits for it"),
    (knows_rank_0_only, "root 1: rank 1 raised ValueError: rank 1 cannot receive from itself"),
]


# Wrong answers to gather(comm, tensor, root)


def receives_from_each(comm, tensor, root, order, buffers):
    if comm.rank != root:
        comm.send(tensor, root)
        return None
    found = []
    for src in order:
        found.append(tensor if src == root else comm.recv(next(buffers), src))
    return found


def fresh(tensor):
    while True:
        yield torch.empty_like(tensor)


def one_buffer_for_all(comm, tensor, root):
    buffer = torch.empty_like(tensor)
    same = iter(lambda: buffer, None)
    return receives_from_each(comm, tensor, root, range(comm.world_size), same)


def leaves_itself_out(comm, tensor, root):
    others = [rank for rank in range(comm.world_size) if rank != root]
    return receives_from_each(comm, tensor, root, others, fresh(tensor))


def puts_itself_first(comm, tensor, root):
    order = sorted(range(comm.world_size), key=lambda rank: (rank != root, rank))
    return receives_from_each(comm, tensor, root, order, fresh(tensor))


def gives_it_to_everyone(comm, tensor, root):
    return collectives.all_gather(comm, tensor)


def gathers_around_the_ring(comm, tensor, root):
    found = collectives.all_gather(comm, tensor)
    return found if comm.rank == root else None


def always_on_rank_0(comm, tensor, root):
    return collectives.gather(comm, tensor, 0)


def stacks_them(comm, tensor, root):
    found = collectives.gather(comm, tensor, root)
    return None if found is None else torch.stack(found)


def keeps_quiet(comm, tensor, root):
    return [tensor] * comm.world_size if comm.rank == root else None


GATHER = [
    (one_buffer_for_all, "is it one buffer, received into again and again"),
    (leaves_itself_out, "it has a list of 2, where a list of 3 is due"),
    (puts_itself_first, "the entries are in another order than the ranks"),
    (gives_it_to_everyone, "it has a list of 3, where nothing (None) is due"),
    (gathers_around_the_ring, "messages: with 3 ranks and 96 elements, root 0: 2, where 0 1 1"),
    (always_on_rank_0, "it has a list of 3, where nothing (None) is due"),
    (stacks_them, "it has a tensor [3, 96], where a list of 3 is due"),
    (keeps_quiet, "in entry 1: it holds what belongs in entry 0"),
]


# Wrong answers to scatter(comm, tensors, out, root)


def deals_out(comm, tensors, out, root, share_of):
    if comm.rank == root:
        for dst in range(comm.world_size):
            if dst != root:
                comm.send(tensors[share_of(dst)], dst)
        out.copy_(tensors[share_of(root)])
    else:
        comm.recv(out, root)


def gives_all_the_first(comm, tensors, out, root):
    deals_out(comm, tensors, out, root, lambda rank: 0)


def deals_in_reverse(comm, tensors, out, root):
    deals_out(comm, tensors, out, root, lambda rank: -1 - rank)


def deals_one_too_far(comm, tensors, out, root):
    deals_out(comm, tensors, out, root, lambda rank: (rank + 1) % comm.world_size)


def forgets_its_own(comm, tensors, out, root):
    before = out.clone()
    collectives.scatter(comm, tensors, out, root)
    if comm.rank == root:
        out.copy_(before)


def fills_a_new_tensor(comm, tensors, out, root):
    return collectives.scatter(comm, tensors, out.clone(), root)


def sends_everyone_everything(comm, tensors, out, root):
    everything = torch.stack(tensors) if tensors else torch.empty(comm.world_size, len(out))
    sends_to_each(comm, everything, root)
    out.copy_(everything[comm.rank])


def deals_from_rank_0(comm, tensors, out, root):
    if comm.rank == 0:
        deals_out(comm, tensors, out, 0, lambda rank: rank)
    else:
        comm.recv(out, 0)


def deals_to_the_next_rank_only(comm, tensors, out, root):
    after = (root + 1) % comm.world_size
    if comm.rank == root:
        comm.send(tensors[after], after)
    elif comm.rank == after:
        comm.recv(out, root)


SCATTER = [
    (deals_to_the_next_rank_only, "1 0 0, where 2 0 0 is the target"),
    (gives_all_the_first, "it holds the share of the first rank"),
    (deals_in_reverse, "the shares are in reverse order"),
    (deals_one_too_far, "it holds the share of the next rank"),
    (forgets_its_own, "unchanged: nothing was written into out"),
    (fills_a_new_tensor, "unchanged: nothing was written into out"),
    (
        sends_everyone_everything,
        "2304 0 0, where 768 0 0 is the target",
    ),
    (deals_from_rank_0, "root 1: rank 0 raised TypeError: 'NoneType' object"),
]


# Wrong answers to reduce(comm, tensor, root)


def everyone_ends_with_the_sum(comm, tensor, root):
    collectives.naive_all_reduce(comm, tensor)


def the_root_forgets_itself(comm, tensor, root):
    if comm.rank == root:
        tensor.zero_()
    collectives.reduce(comm, tensor, root)


def always_to_rank_0(comm, tensor, root):
    collectives.reduce(comm, tensor, 0)


def root_keeps_the_last(comm, tensor, root):
    if comm.rank != root:
        comm.send(tensor, root)
    else:
        for src in range(comm.world_size):
            if src != root:
                comm.recv(tensor, src)


def sends_nothing(comm, tensor, root):
    tensor *= 1


def reduces_to_the_mean(comm, tensor, root):
    collectives.reduce(comm, tensor, root, "mean")


def a_chain_that_counts_the_root_twice(comm, tensor, root):
    own = tensor.clone()
    collectives.reduce(comm, tensor, root)
    if comm.rank == root:
        tensor += own


REDUCE = [
    (everyone_ends_with_the_sum, "all ranks together: 4, where 2 is the target"),
    (the_root_forgets_itself, "the rank's own values are missing from the sum"),
    (always_to_rank_0, "root 1, rank 1 is the first that is wrong: unchanged"),
    (root_keeps_the_last, "overwritten instead of added: it holds rank 2's values alone"),
    (sends_nothing, "nothing was sent"),
    (reduces_to_the_mean, "divided by 3: it is the mean, where the sum is due"),
    (a_chain_that_counts_the_root_twice, "the rank's own values are added twice"),
]


# Wrong answers to barrier(comm)


def waits_for_nobody(comm):
    pass


def tells_the_next_rank(comm):
    right, left = neighbours(comm)
    comm.exchange(torch.ones(1), right, torch.empty(1), left)


def reports_to_rank_0(comm):
    if comm.rank:
        comm.send(torch.ones(1), 0)
    for src in range(1, comm.world_size if comm.rank == 0 else 0):
        comm.recv(torch.empty(1), src)


def hears_from_rank_0(comm):
    sends_to_each(comm, torch.ones(1), 0)


def sleeps_a_little(comm):
    time.sleep(0.001)


def borrows_comms_barrier(comm):
    comm.barrier()


def all_wait_first(comm):
    right, left = neighbours(comm)
    comm.recv(torch.empty(1), left)
    comm.send(torch.ones(1), right)


BARRIER = [
    (waits_for_nobody, "nobody waits for it"),
    (tells_the_next_rank, "did not wait"),
    (reports_to_rank_0, "did not wait"),
    (hears_from_rank_0, "did not wait"),
    (sleeps_a_little, "nobody waits for it"),
    (borrows_comms_barrier, "comm.barrier did the waiting"),
    (all_wait_first, "all of them receive first"),
]


CHECKS = {
    "share_reduce": (check.ring.share_reduce, collectives.share_reduce, 4, SHARE_REDUCE),
    "share_only": (check.ring.share_only, collectives.share_only, 4, SHARE_ONLY),
    "ring": (check.ring.all_reduce, collectives.ring_all_reduce, 4, RING),
    "naive": (check.naive.all_reduce, collectives.naive_all_reduce, 4, NAIVE),
    "tree": (check.tree.all_reduce, collectives.tree_all_reduce, 4, TREE),
    "broadcast": (check.collectives.broadcast, collectives.broadcast, 3, BROADCAST),
    "gather": (check.collectives.gather, collectives.gather, 3, GATHER),
    "scatter": (check.collectives.scatter, collectives.scatter, 3, SCATTER),
    "reduce": (check.collectives.reduce, collectives.reduce, 3, REDUCE),
    "barrier": (check.collectives.barrier, collectives.dissemination_barrier, 4, BARRIER),
}
MUTANTS = [
    pytest.param(name, fn, words, id=f"{name}-{fn.__name__}")
    for name, (_, _, _, mutants) in CHECKS.items()
    for fn, words in mutants
]
# What raises or stands still ends its run; all others share one.
BREAK_OFF = {all_receive_first, uses_torch_chunk, forgets_rank_1, counts_up_instead_of_flipping}
BREAK_OFF |= {nobody_receives, knows_rank_0_only, deals_from_rank_0, all_wait_first}


@pytest.fixture(scope="module")
def verdicts():
    """By name and answer, or by a few words: what one run for each world size finds out."""
    found = {
        "a tree on 2": partial(check.tree.all_reduce, tries_each_distance, world_sizes=(2,)),
        "a tree on 4": partial(check.tree.all_reduce, tries_each_distance, world_sizes=(4,)),
        "a tree on 8": partial(check.tree.all_reduce, tries_each_distance, world_sizes=(8,)),
        "left": partial(check.ring.share_only, copies_to_the_left, to="left", world_sizes=(3,)),
        "mean": partial(check.ring.all_reduce, takes_the_mean, op="mean", world_sizes=(3,)),
        "no mean": partial(
            check.ring.all_reduce, goes_around_the_ring, op="mean", world_sizes=(3,)
        ),
        tell_left: partial(check.grade, tell_left, TOLD, (3,)),
        keep: partial(check.grade, keep, TOLD, (2,)),
    }
    for name, (checker, reference, world_size, mutants) in CHECKS.items():
        for size in default_sizes(checker):
            found[name, size] = partial(checker, reference, world_sizes=(size,))
        for fn, _ in mutants:
            if fn not in BREAK_OFF:
                found[name, fn] = partial(checker, fn, world_sizes=(world_size,))
    return in_shared_runs(found)


@pytest.mark.parametrize("name", CHECKS)
def test_the_reference_passes_on_every_world_size(name, verdicts):
    checker, _, _, mutants = CHECKS[name]
    assert len(mutants) >= 5
    assert default_sizes(checker) == ((2, 8) if name == "tree" else (2, 3, 4))
    for size in default_sizes(checker):
        assert verdicts[name, size].passed, verdicts[name, size]


def test_what_is_printed_is_what_is_returned(capsys):
    verdict = check.ring.all_reduce(collectives.ring_all_reduce)
    said = capsys.readouterr().out
    assert said.startswith("passed: ")
    assert said == f"{verdict!r}\n"
    assert verdict.columns == ["2 ranks", "3 ranks", "4 ranks"]


@pytest.mark.parametrize(("name", "wrong", "words"), MUTANTS)
def test_a_wrong_answer_is_told_by_its_mistake(name, wrong, words, verdicts):
    checker, _, world_size, _ = CHECKS[name]
    if wrong in BREAK_OFF:
        verdict = checker(wrong, world_sizes=(world_size,))
    else:
        verdict = verdicts[name, wrong]
    assert not verdict.passed
    said = repr(verdict)
    assert said.startswith("not yet: ")
    assert words in said, said


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("tree", adds_itself, "overwritten"),
        ("tree", one_round_more, "where a chunk is due"),
        ("gather", gathers_around_the_ring, "where a chunk is due"),
        ("naive", never_sends_back, "bottleneck"),
        ("scatter", deals_to_the_next_rank_only, "bottleneck"),
        ("tree", leaves_ten_numbers_alone, "chunks"),
        ("broadcast", garbles_the_end, "it begins with"),
    ],
)
def test_a_diagnosis_is_not_given_where_it_is_false(name, wrong, words, verdicts):
    verdict = verdicts[name, wrong]
    assert not verdict.passed
    assert verdict.rows["finished"] == ["yes"]
    assert words not in repr(verdict)


def test_a_tree_that_goes_wrong_on_eight_ranks_alone_is_found(verdicts):
    assert verdicts["a tree on 2"].passed
    assert verdicts["a tree on 4"].passed
    assert not verdicts["a tree on 8"].passed
    said = repr(verdicts["a tree on 8"])
    assert "with 8 ranks and 96 elements: 4, where 3 is the target" in said


def test_what_is_not_looked_at_is_not_called_right(verdicts):
    rows = verdicts["tree", adds_itself].rows
    assert (rows["shape"], rows["value"], rows["same bits"]) == (["right"], ["wrong"], ["-"])
    rows = verdicts["gather", stacks_them].rows
    assert (rows["shape"], rows["value"], rows["messages"]) == (["wrong"], ["-"], ["0 1 1"])


def test_a_cell_of_another_size_says_so(verdicts):
    rows = verdicts["tree", leaves_ten_numbers_alone].rows
    assert rows["value"] == ["wrong (at 10)"]
    assert rows["messages"] == ["0, not 2 (at 10)"]


def not_written_yet(comm, tensor):
    raise NotImplementedError("exercise 2")


def stops_at_rank_1(comm, tensor):
    return tensor[comm.rank + 9 * (comm.rank == 1)] if len(tensor) == 10 else None


def never_ends(comm, tensor):
    while True:
        time.sleep(0.01)


def leaves(comm, tensor):
    sys.exit(0)


def returns_its_comm(comm, tensor):
    return comm


# One of each way in which a check calls an answer.
@pytest.mark.parametrize("name", ["share_reduce", "ring", "broadcast", "barrier"])
def test_a_stub_is_not_attempted_yet(name, capsys):
    def stub(*args):
        raise NotImplementedError

    checker, _, _, _ = CHECKS[name]
    assert checker(stub).status == "not attempted yet"
    assert re.fullmatch(r"not attempted yet: [\w.]+\n", capsys.readouterr().out)


def flips_bits_of_floats(comm, tensor):
    return tensor ^ 1


def a_wordy_stub(comm, tensor):
    raise NotImplementedError(
        "exercise 2: all ranks send to rank 0, which adds, and sends the sum back to each of them"
    )


def test_an_error_of_pytorch_is_not_taken_for_a_stub(capsys):
    assert check.naive.all_reduce(flips_bits_of_floats).status == "not yet"
    assert "not implemented for 'Float'" in capsys.readouterr().out
    assert check.naive.all_reduce(a_wordy_stub).status == "not attempted yet"
    assert check.answers(lambda a: torch.ones(a) ^ 1, {(2,): 3}).status == "not yet"
    assert "not implemented for 'Float'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (None, "a function is needed, got NoneType: pass its name, without ()"),
        (3, "a function is needed, got int"),
        (lambda comm: None, "it takes (comm), and is called with (comm, tensor)"),
        (
            stops_at_rank_1,
            "with 2 ranks and 10 elements: rank 1 raised IndexError"
            "|return tensor[comm.rank + 9 * (comm.rank == 1)]",
        ),
        (leaves, "called sys.exit(0) before its function had returned"),
        (returns_its_comm, "a comm belongs to its rank and its run"),
        (partial(stops_at_rank_1, threading.Lock()), "and is called with (comm, tensor)"),
        (threading.Lock().acquire, "it cannot be sent to other processes"),
    ],
)
def test_nothing_raises_out_of_a_check(thing, words, capsys):
    verdict = check.naive.all_reduce(thing)
    assert not verdict.passed
    said = capsys.readouterr().out
    for part in words.split("|"):
        assert part in said
    assert "Traceback" not in said


def test_a_loop_without_an_end_meets_the_deadline(monkeypatch, capsys):
    monkeypatch.setattr(runs, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(runs, "AGAIN_S", 0.5)
    assert not check.naive.all_reduce(never_ends).passed
    said = capsys.readouterr().out
    assert "with 2 ranks and 96 elements: the run was still going" in said
    assert "time.sleep(0.01)" in said


def test_a_check_that_breaks_off_itself_says_so(capsys):
    exercise = check.Exercise("broken", expected=lambda rank, case: 1 / 0)
    assert not check.grade(collectives.ring_all_reduce, exercise, (2,)).passed
    assert "the check itself broke off with ZeroDivisionError" in capsys.readouterr().out


# The core, as a page uses it


def tell_right(comm, number):
    right, left = neighbours(comm)
    return comm.exchange(torch.tensor([number]), right, torch.empty(1), left).item()


def tell_left(comm, number):
    right, left = neighbours(comm)
    return comm.exchange(torch.tensor([number]), left, torch.empty(1), right).item()


def keep(comm, number):
    return number


TOLD = check.Exercise(
    "tell your neighbour",
    signature="comm, number",
    inputs=lambda rank, case: (10.0 * rank,),
    expected=lambda rank, case: 10.0 * ((rank - 1) % case.world_size),
    written=None,
    target=lambda rank, case: check.Target(1, 4, 1, frozenset({(rank + 1) % case.world_size})),
    mistakes={"it is the rank's own number": lambda rank, case: 10.0 * rank},
    sizes=(),
)


def test_a_page_can_grade_an_exercise_of_its_own(verdicts):
    right = check.grade(tell_right, TOLD)
    assert right.passed
    assert "messages   1         1         1" in repr(right)
    assert not verdicts[tell_left].passed
    assert not verdicts[keep].passed
    left, kept = repr(verdicts[tell_left]), repr(verdicts[keep])
    assert "with 3 ranks, rank 0 is the first that is wrong: it has 10.0, where 20.0" in left
    assert "that is the left neighbour, where the right one is due" in left
    assert "rank 0 is the first that is wrong: it is the rank's own number" in kept
    assert "nothing was sent" in kept


def test_a_function_without_ranks_is_graded_by_its_answers(capsys):
    def add(a, b):
        return a + b

    def stub(a, b):
        raise NotImplementedError

    sums = {(1, 2): 3, (2, 2): 4}
    assert check.answers(add, sums).passed
    assert not check.answers(max, sums).passed
    assert not check.answers(lambda a, b: a[b], sums).passed
    assert not check.answers(3, sums).passed
    assert check.answers(stub, sums).status == "not attempted yet"
    said = capsys.readouterr().out
    assert "passed: add\nall 2 answers are right" in said
    assert "max(1, 2) is 3, and yours says 2" in said
    assert "TypeError" in said
    assert "not attempted yet: stub" in said


def test_an_answer_may_be_a_tensor(capsys):
    assert not check.answers(torch.ones, {(2,): 3}).passed
    assert "ones(2) is 3, and yours says tensor([1., 1.])" in capsys.readouterr().out
    assert check.answers(torch.ones, {(2,): torch.ones(2)}).passed
    assert not check.answers(torch.ones, {(2,): torch.zeros(2)}).passed


def test_share_only_to_the_left_and_the_mean_are_targets_too(verdicts):
    assert verdicts["left"].passed
    assert verdicts["mean"].passed
    assert "not divided by 3" in repr(verdicts["no mean"])


def test_a_verdict_is_a_table_in_html_too():
    verdict = check.Verdict("a < b", "passed", ["2 ranks"], {"value": ["right"]}, ["1 < 2"])
    assert verdict
    page = verdict._repr_html_()
    assert '<th scope="row">value</th><td>right</td>' in page
    assert "a &lt; b" in page
    assert "1 &lt; 2" in page
    assert repr(verdict).splitlines()[2:4] == ["        2 ranks", "value   right"]


def test_the_check_is_shown_once_in_a_notebook(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    verdict = check.Verdict("ring", "passed", shown=True)
    verdict._ipython_display_()
    assert not shown
    verdict._ipython_display_()
    assert shown[0]["text/plain"] == "passed: ring"


# What a value is made of


def test_contents_tell_how_often_each_piece_is_in_a_value():
    case = Case(world_size=4, size=96)
    basis = {
        (rank, chunk): piece
        for rank in range(4)
        for chunk, piece in enumerate(split_chunks(case.tensor(rank), 4))
    }
    value = basis[0, 1] + 2 * basis[3, 1] + basis[2, 0] / 4
    assert contents(value, basis, 1) == {(0, 1): 1, (3, 1): 2, (2, 0): 0.25}
    assert contents(torch.rand(24), basis, 1) is None
    assert contents(value[:2], basis, 1) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({(1, 0): 1}, "unchanged"),
        ({(2, 0): 1}, "overwritten instead of added: it holds rank 2's values alone"),
        ({(0, 0): 1, (1, 0): 2, (2, 0): 1}, "the rank's own values are added twice"),
        ({(0, 0): 1, (1, 0): 1, (2, 0): 3}, "the values of rank 2 are added more than once"),
        ({(0, 0): 1, (2, 0): 1}, "the rank's own values are missing from the sum"),
        ({(0, 0): 1, (1, 0): 1}, "partial sum: it holds rank 0 + rank 1, and lacks rank 2"),
        ({(0, 0): 3, (1, 0): 3, (2, 0): 3}, "3 times what is due: not divided by 3"),
        ({(0, 0): 2, (1, 0): 2, (2, 0): 2}, "2 times what is due"),
        ({(0, 0): 1, (1, 1): 1}, "values of chunk 1 are in it"),
        ({(0, 0): 2, (1, 0): 1}, "it is 2 x rank 0 + rank 1, where rank 0 + rank 1 + rank 2"),
    ],
)
def test_a_wrong_sum_has_a_name(found, words):
    everyone = {(rank, 0): 1.0 for rank in range(3)}
    assert words in name_mistake(found, everyone, (1, 0), 3)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({(0, 0): 0.25, (1, 0): 0.25}, "0.5 times what is due"),
        ({(0, 0): 1, (1, 0): 1}, "2 times what is due: not divided by 2"),
        ({(1, 0): 0.5}, "partial sum: it holds 0.5 x rank 1, and lacks rank 0"),
        ({(0, 0): 0.5}, "overwritten instead of added: it holds rank 0's values alone"),
    ],
)
def test_a_wrong_mean_has_a_name(found, words):
    mean = {(rank, 0): 0.5 for rank in range(2)}
    said = name_mistake(found, mean, (1, 0), 2)
    assert said.startswith(words)


def test_the_checks_are_quiet_about_time_and_give_the_same_text_twice(verdicts):
    again = check.tree.all_reduce(stops_after_one_round, world_sizes=(4,))
    assert repr(again) == repr(verdicts["tree", stops_after_one_round])


def test_importing_labkit_does_not_import_the_checks():
    code = "import sys, labkit; print([m for m in sys.modules if m.startswith('labkit.check')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
