"""Answers to ``check.collectives``."""

import time
from itertools import repeat

import torch
from graded import Answers
from ranks import travel_by_value

from answers.ring import neighbours
from labkit import collectives
from workbook import check

travel_by_value(__name__)


# broadcast(comm, tensor, root)


def sends_to_each(comm, tensor, root):
    if comm.rank == root:
        for dst in range(comm.world_size):
            if dst != root:
                comm.send(tensor, dst)
    else:
        comm.recv(tensor, root)


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


def adds_it_twice(comm, tensor, root):
    own = tensor.clone()
    sends_to_each(comm, tensor, root)
    if comm.rank != root:
        tensor += 2 * own


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


def everyone_tells_the_next(comm, tensor, root):
    right, left = neighbours(comm)
    comm.exchange(tensor.clone(), right, tensor, left)


BROADCAST = [
    (everyone_tells_the_next, "copy.other_rank"),
    (garbles_the_end, "value.numbers", "from index 48 on it has ["),
    (lambda comm, tensor, root: sends_to_each(comm, tensor, 0), "value.unchanged"),
    (only_the_next_rank, "value.unchanged"),
    (around_and_back_to_the_root, "messages.one_in_all_more"),
    (adds_the_broadcast, "copy.added"),
    (adds_it_twice, "copy.mixed"),
    (returns_what_it_received, "value.new_tensor"),
    (nobody_receives, "run.stuck"),
    (knows_rank_0_only, "run.error"),
]


# gather(comm, tensor, root)


def receives_from_each(order_of, buffers_for=lambda tensor: map(torch.empty_like, repeat(tensor))):
    """The root receives in the order ``order_of(comm, root)``, into one buffer after another."""

    def fn(comm, tensor, root):
        if comm.rank != root:
            comm.send(tensor, root)
            return None
        buffers = buffers_for(tensor)
        ranks = order_of(comm, root)
        return [tensor if src == root else comm.recv(next(buffers), src) for src in ranks]

    return fn


def one_buffer(tensor):
    return repeat(torch.empty_like(tensor))


def every_rank(comm, root):
    return range(comm.world_size)


def to_rank_0(comm, tensor, root):
    return receives_from_each(every_rank)(comm, tensor, 0)


def gathers_around_the_ring(comm, tensor, root):
    found = collectives.all_gather(comm, tensor)
    return found if comm.rank == root else None


def stacks_them(comm, tensor, root):
    found = collectives.gather(comm, tensor, root)
    return None if found is None else torch.stack(found)


def keeps_quiet(comm, tensor, root):
    return [tensor] * comm.world_size if comm.rank == root else None


def ranks_in_place_of_tensors(comm, tensor, root):
    found = collectives.gather(comm, tensor, root)
    return found and [tensor if src == root else src for src in range(comm.world_size)]


GATHER = [
    (receives_from_each(every_rank, one_buffer), "gather.one_buffer"),
    (
        receives_from_each(lambda comm, root: sorted({*range(comm.world_size)} - {root})),
        "value.kind",
    ),
    (
        receives_from_each(
            lambda comm, root: sorted(range(comm.world_size), key=lambda r: (r != root, r))
        ),
        "gather.order",
    ),
    (lambda comm, tensor, root: collectives.all_gather(comm, tensor), "value.kind"),
    (
        gathers_around_the_ring,
        "traffic.off_target",
        "not bytes.whole_tensor",
        "messages: with 3 ranks and 96 elements, root 0: 2, where the target is 0 1 1",
    ),
    (lambda comm, tensor, root: collectives.gather(comm, tensor, 0), "value.kind"),
    (to_rank_0, "value.kind", "peers.other_hub", "not peers.bottleneck"),
    (ranks_in_place_of_tensors, "value.kind"),
    (keeps_quiet, "value.elsewhere"),
]


# scatter(comm, tensors, out, root)


def deals_out(share_of):
    """Rank r gets ``tensors[share_of(r, P, root)]``."""

    def fn(comm, tensors, out, root):
        if comm.rank != root:
            comm.recv(out, root)
            return
        for dst in range(comm.world_size):
            share = tensors[share_of(dst, comm.world_size, root)]
            if dst == root:
                out.copy_(share)
            else:
                comm.send(share, dst)

    return fn


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
        deals_out(lambda rank, P, root: rank)(comm, tensors, out, 0)
    else:
        comm.recv(out, 0)


def deals_to_the_next_rank_only(comm, tensors, out, root):
    after = (root + 1) % comm.world_size
    if comm.rank == root:
        comm.send(tensors[after], after)
    elif comm.rank == after:
        comm.recv(out, root)


SCATTER = [
    (deals_to_the_next_rank_only, "traffic.off_target", "not peers.bottleneck"),
    (deals_out(lambda rank, P, root: 0), "scatter.first"),
    (deals_out(lambda rank, P, root: root or rank), "scatter.root"),
    (deals_out(lambda rank, P, root: -1 - rank), "scatter.reversed"),
    (deals_out(lambda rank, P, root: (rank + 1) % P), "scatter.next"),
    (deals_out(lambda rank, P, root: rank - 1), "scatter.before"),
    (forgets_its_own, "scatter.unchanged"),
    (fills_a_new_tensor, "scatter.unchanged"),
    (sends_everyone_everything, "traffic.off_target"),
    (deals_from_rank_0, "run.error"),
]


# reduce(comm, tensor, root)


def the_root_forgets_itself(comm, tensor, root):
    if comm.rank == root:
        tensor.zero_()
    collectives.reduce(comm, tensor, root)


def root_keeps_the_last(comm, tensor, root):
    if comm.rank != root:
        comm.send(tensor, root)
    else:
        for src in range(comm.world_size):
            if src != root:
                comm.recv(tensor, src)


def counts_twice(who):
    """The sum, with the values of rank ``who(P, root)`` added once more."""

    def fn(comm, tensor, root):
        twice = who(comm.world_size, root)
        own = tensor.clone()
        if comm.rank == twice != root:
            tensor *= 2
        collectives.reduce(comm, tensor, root)
        if comm.rank == root == twice:
            tensor += own

    return fn


REDUCE = [
    (lambda comm, tensor, root: collectives.naive_all_reduce(comm, tensor), "traffic.off_target"),
    (the_root_forgets_itself, "sum.own_missing"),
    (lambda comm, tensor, root: collectives.reduce(comm, tensor, 0), "value.unchanged"),
    (root_keeps_the_last, "sum.overwritten"),
    (lambda comm, tensor, root: None, "traffic.nothing"),
    (lambda comm, tensor, root: collectives.reduce(comm, tensor, root, "mean"), "sum.mean"),
    (counts_twice(lambda P, root: root), "sum.own_twice"),
    (counts_twice(lambda P, root: (root + 1) % P), "sum.twice"),
]


# barrier(comm)


def tells_the_next_rank(comm):
    right, left = neighbours(comm)
    comm.exchange(torch.ones(1), right, torch.empty(1), left)


def reports_to_rank_0(comm):
    if comm.rank:
        comm.send(torch.ones(1), 0)
    for src in range(1, comm.world_size if comm.rank == 0 else 0):
        comm.recv(torch.empty(1), src)


def all_wait_first(comm):
    right, left = neighbours(comm)
    comm.recv(torch.empty(1), left)
    comm.send(torch.ones(1), right)


BARRIER = [
    (lambda comm: None, "barrier.alone"),
    (lambda comm: time.sleep(0.001), "barrier.alone"),
    (tells_the_next_rank, "barrier.some"),
    (reports_to_rank_0, "barrier.some"),
    (lambda comm: sends_to_each(comm, torch.ones(1), 0), "barrier.some"),
    (lambda comm: comm.barrier(), "barrier.borrowed"),
    (all_wait_first, "run.stuck"),
]


ANSWERS = [
    Answers(
        check.collectives.gather,
        [collectives.gather, receives_from_each(every_rank), stacks_them],
        GATHER,
    ),
]
