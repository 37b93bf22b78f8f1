"""More answers to ``check.collectives``: right ones in unusual forms, wrong ones."""

import itertools
import time

import torch
from graded import Answers
from ranks import travel_by_value

from answers.collectives import sends_to_each
from answers.ring import neighbours
from labkit import collectives
from workbook import check

travel_by_value(__name__)


def others(comm, root):
    return [rank for rank in range(comm.world_size) if rank != root]


def distance(comm, root):
    """How far this rank is from the root, to the right."""
    return (comm.rank - root) % comm.world_size


# broadcast(comm, tensor, root)


def down_the_chain(comm, tensor, root):
    right, left = neighbours(comm)
    if comm.rank != root:
        comm.recv(tensor, left)
    if right != root:
        comm.send(tensor, right)


def halves_the_ranks(comm, tensor, root):
    """Ranks first .. end - 1, counted from the root: the first one tells the one in the middle."""

    def tell(first, end):
        if end - first < 2:
            return
        middle, mine = (first + end + 1) // 2, distance(comm, root)
        if mine == first:
            comm.send(tensor, (root + middle) % comm.world_size)
        elif mine == middle:
            comm.recv(tensor, (root + first) % comm.world_size)
        tell(*((first, middle) if mine < middle else (middle, end)))

    tell(0, comm.world_size)
    return tensor


def into_a_new_tensor_first(comm, tensor, root):
    if comm.rank == root:
        for dst in reversed(others(comm, root)):
            comm.send(tensor.clone(), dst)
    else:
        tensor[:] = comm.recv(torch.empty(tensor.shape), root)


def doubles_the_knowing(comm, tensor, root):
    mine, knowing = distance(comm, root), 1
    while knowing < comm.world_size:
        if mine < knowing and mine + knowing < comm.world_size:
            comm.send(tensor, (comm.rank + knowing) % comm.world_size)
        elif knowing <= mine < 2 * knowing:
            comm.recv(tensor, (comm.rank - knowing) % comm.world_size)
        knowing *= 2


def whoever_has_it(comm, tensor, root):
    if comm.rank != root:
        comm.recv_any(tensor, others(comm, comm.rank))
    after = distance(comm, root) + 1
    if after < comm.world_size:
        comm.send(tensor, (root + after) % comm.world_size)


def sends_then_zeroes(comm, tensor, root):
    sends_to_each(comm, tensor, root)
    if comm.rank == root:
        tensor.zero_()


def in_two_pieces(comm, tensor, root):
    middle = len(tensor) // 2
    sends_to_each(comm, tensor[:middle], root)
    sends_to_each(comm, tensor[middle:], root)


def sums_with_zeros(comm, tensor, root):
    if comm.rank != root:
        tensor.zero_()
    collectives.naive_all_reduce(comm, tensor)


def three_ranks_at_most(comm, tensor, root):
    if comm.rank == root:
        for dst in others(comm, root)[:2]:
            comm.send(tensor, dst)
    elif comm.rank in [rank for rank in range(comm.world_size) if rank != root][:2]:
        comm.recv(tensor, root)


def in_float16(comm, tensor, root):
    half = tensor.half()
    sends_to_each(comm, half, root)
    tensor.copy_(half)


RIGHT_BROADCASTS = [
    down_the_chain,
    halves_the_ranks,
    into_a_new_tensor_first,
    doubles_the_knowing,
    whoever_has_it,
]
WRONG_BROADCASTS = [
    (sends_then_zeroes, "value.zeros"),
    (in_two_pieces, "traffic.off_target"),
    (sums_with_zeros, "traffic.off_target"),
    (three_ranks_at_most, "value.unchanged"),
    (in_float16, "value.wrong"),
]


# gather(comm, tensor, root)


def whoever_is_ready(comm, tensor, root):
    if comm.rank != root:
        comm.send(tensor, root)
        return None
    found, waiting = {root: tensor}, set(others(comm, root))
    while waiting:
        buffer = torch.empty_like(tensor)
        src = comm.recv_any(buffer, waiting)
        waiting.remove(src)
        found[src] = buffer
    return tuple(found[rank] for rank in sorted(found))


def into_rows(comm, tensor, root):
    if comm.rank != root:
        return comm.send(tensor, root)
    rows = torch.empty(comm.world_size, *tensor.shape)
    rows[root] = tensor
    for src in others(comm, root):
        comm.recv(rows[src], src)
    return rows.unbind()


def with_numpy(comm, tensor, root):
    found = into_rows(comm, tensor, root)
    return None if found is None else [row.numpy() for row in found]


def yields_them(comm, tensor, root):
    found = into_rows(comm, tensor, root)
    return None if found is None else (row for row in found)


def from_the_last(comm, tensor, root):
    def from_rank(src):
        return tensor.clone() if src == root else comm.recv(tensor.new_zeros(tensor.shape), src)

    if comm.rank == root:
        return [from_rank(src) for src in reversed(range(comm.world_size))][::-1]
    return comm.send(tensor, root)


def backwards(comm, tensor, root):
    found = into_rows(comm, tensor, root)
    return None if found is None else found[::-1]


def to_every_rank_but_the_root(comm, tensor, root):
    found = into_rows(comm, tensor, root)
    return [tensor] if found is None else found


def one_long_tensor(comm, tensor, root):
    found = into_rows(comm, tensor, root)
    return None if found is None else torch.cat(found)


def zeros_for_the_root(comm, tensor, root):
    found = into_rows(comm, tensor, root)
    return found and [torch.zeros_like(t) if r == root else t for r, t in enumerate(found)]


def the_root_twice(comm, tensor, root):
    found = into_rows(comm, tensor, root)
    return found and [found[root], *found[1:]]


RIGHT_GATHERS = [whoever_is_ready, into_rows, with_numpy, yields_them, from_the_last]
WRONG_GATHERS = [
    (backwards, "value.elsewhere"),
    (to_every_rank_but_the_root, "value.kind"),
    (one_long_tensor, "value.kind"),
    (zeros_for_the_root, "value.zeros"),
    (the_root_twice, "value.wrong"),
]


# scatter(comm, tensors, out, root)


def its_own_first(comm, tensors, out, root):
    if tensors is None:
        comm.recv(out, root)
    else:
        out[...] = tensors[root]
        for dst in others(comm, root)[::-1]:
            comm.send(tensors[dst], dst)


def pops_the_shares(comm, tensors, out, root):
    while tensors:
        share, dst = tensors.pop(), len(tensors)
        out.copy_(share) if dst == root else comm.send(share, dst)
    if comm.rank != root:
        comm.recv(out, root)


def from_one_table(comm, tensors, out, root):
    if comm.rank == root:
        for dst, row in enumerate(torch.stack(tensors)):
            torch.add(row, 0, out=out) if dst == root else comm.send(row, dst)
    else:
        out.set_(out.copy_(comm.recv(torch.zeros_like(out), root)))
    return out


def starts_to_the_right(comm, tensors, out, root):
    if comm.rank == root:
        for step in range(1, comm.world_size):
            dst = (root + step) % comm.world_size
            comm.send(tensors[dst], dst)
        out.copy_(tensors[root])
    else:
        comm.recv(out, root)


def with_numpy_out(comm, tensors, out, root):
    array = out.numpy()
    if comm.rank == root:
        array[:] = tensors[root].numpy()
        [comm.send(torch.as_tensor(tensors[dst].numpy()), dst) for dst in others(comm, root)]
    else:
        array[:] = comm.recv(torch.empty(array.shape), root).numpy()


def adds_the_shares(comm, tensors, out, root):
    own = out.clone()
    its_own_first(comm, tensors, out, root)
    out += own


def counts_the_others(comm, tensors, out, root):
    """The n-th of the others gets entry n: right for the last root alone."""
    if comm.rank == root:
        for place, dst in enumerate(others(comm, root)):
            comm.send(tensors[place], dst)
        out.copy_(tensors[-1])
    else:
        comm.recv(out, root)


def passes_them_along(comm, tensors, out, root):
    """Each rank passes on the shares of those behind it."""
    right, left = neighbours(comm)
    behind = comm.world_size - 1 - distance(comm, root)
    if comm.rank == root:
        shares = [tensors[(root + step) % comm.world_size] for step in range(comm.world_size)]
    else:
        shares = [comm.recv(torch.empty_like(out), left) for _ in range(behind + 1)]
    out.copy_(shares[0])
    for share in shares[1:]:
        comm.send(share, right)


def three_shares_at_most(comm, tensors, out, root):
    if comm.rank == root:
        for dst in others(comm, root):
            comm.send(tensors[dst % 3], dst)
        out.copy_(tensors[root])
    else:
        comm.recv(out, root)


def binds_out(comm, tensors, out, root):
    if comm.rank == root:
        for dst in others(comm, root):
            comm.send(tensors[dst], dst)
        out = tensors[root]
    else:
        comm.recv(out, root)


RIGHT_SCATTERS = [
    its_own_first,
    pops_the_shares,
    from_one_table,
    starts_to_the_right,
    with_numpy_out,
]
WRONG_SCATTERS = [
    (adds_the_shares, "value.wrong"),
    (counts_the_others, "value.wrong"),
    (passes_them_along, "traffic.off_target"),
    (three_shares_at_most, "value.wrong"),
    (binds_out, "scatter.unchanged"),
]


# reduce(comm, tensor, root)


def to_the_root_at_once(comm, tensor, root):
    if comm.rank != root:
        comm.send(tensor, root)
    else:
        rows = [comm.recv(torch.empty_like(tensor), src) for src in others(comm, root)]
        tensor += torch.stack(rows).sum(0)


def along_the_chain(comm, tensor, root):
    """The rank to the right of the root begins, and the root ends."""
    right, left = neighbours(comm)
    if left != root:
        comm.recv_add(tensor, left)
    if comm.rank != root:
        comm.send(tensor, right)


def starts_at_the_far_end(comm, tensor, root):
    right, left = neighbours(comm)
    total = tensor.clone()
    if right != root:
        total += comm.recv(torch.empty_like(tensor), right)
    tensor.zero_()
    comm.send(total, left) if comm.rank != root else tensor.add_(total)


def in_pairs(comm, tensor, root):
    """Recursively: the upper half of the ranks sends to the lower half."""
    mine, left = distance(comm, root), comm.world_size
    while left > 1:
        half = (left + 1) // 2
        if half <= mine < left:
            comm.send(tensor, (comm.rank - half) % comm.world_size)
        elif mine + half < left:
            comm.recv_add(tensor, (comm.rank + half) % comm.world_size)
        left = half


def whoever_comes(comm, tensor, root):
    waiting = set(others(comm, root)) if comm.rank == root else set()
    incoming, arrays = torch.empty_like(tensor), tensor.numpy()
    if comm.rank != root:
        comm.send(tensor, root)
    while waiting:
        waiting.discard(comm.recv_any(incoming, sorted(waiting)))
        arrays += incoming.numpy()


def a_chain_without_the_root(comm, tensor, root):
    """The root receives the sum of the others into its own values."""
    right, left = neighbours(comm)
    if comm.rank == root:
        comm.recv(tensor, left)
    else:
        if left != root:
            comm.recv_add(tensor, left)
        comm.send(tensor, right)


def a_star_of_sums(comm, tensor, root):
    """Every rank adds what its left neighbour has, and sends that to the root."""
    if comm.rank != root:
        comm.send(2 * tensor, root)
    else:
        for src in others(comm, root):
            comm.recv_add(tensor, src)


def the_largest(comm, tensor, root):
    if comm.rank != root:
        comm.send(tensor, root)
    else:
        for src in others(comm, root):
            tensor.copy_(torch.maximum(tensor, comm.recv(torch.empty_like(tensor), src)))


def adds_in_a_new_tensor(comm, tensor, root):
    if comm.rank != root:
        comm.send(tensor, root)
        return None
    return sum((comm.recv(torch.empty_like(tensor), src) for src in others(comm, root)), tensor)


def to_rank_0_first(comm, tensor, root):
    to_the_root_at_once(comm, tensor, 0)
    if root and comm.rank == 0:
        comm.send(tensor, root)
    elif root and comm.rank == root:
        comm.recv(tensor, 0)


RIGHT_REDUCTIONS = [
    to_the_root_at_once,
    along_the_chain,
    starts_at_the_far_end,
    in_pairs,
    whoever_comes,
]
WRONG_REDUCTIONS = [
    (a_chain_without_the_root, "sum.own_missing"),
    (a_star_of_sums, "value.wrong"),
    (the_largest, "value.numbers"),
    (adds_in_a_new_tensor, "value.new_tensor"),
    (to_rank_0_first, "messages.one_in_all_more"),
]


# barrier(comm)


def token():
    return torch.zeros(1, dtype=torch.uint8)


def to_rank_0_and_back(comm):
    for rank in range(1, comm.world_size):
        if comm.rank == 0:
            comm.recv(token(), rank)
        elif comm.rank == rank:
            comm.send(token(), 0)
    sends_to_each(comm, token(), 0)


def two_laps(comm):
    right, left = neighbours(comm)
    for _ in range(2):
        if comm.rank:
            comm.recv(token(), left)
            comm.send(token(), right)
        else:
            comm.send(token(), right)
            comm.recv(token(), left)


def each_with_each(comm):
    for step in range(1, comm.world_size):
        right, left = (comm.rank + step) % comm.world_size, (comm.rank - step) % comm.world_size
        comm.exchange(token(), right, token(), left)


def steps_around(comm):
    right, left = neighbours(comm)
    for _ in range(comm.world_size - 1):
        comm.exchange(token(), right, token(), left)


def doubling_distances(comm):
    for power in itertools.takewhile(lambda k: 2**k < comm.world_size, itertools.count()):
        right = (comm.rank + 2**power) % comm.world_size
        comm.exchange(token(), right, token(), (comm.rank - 2**power) % comm.world_size)


def rank_0_hears_anyone(comm):
    if comm.rank:
        comm.exchange(token(), 0, token(), 0)
    else:
        waiting = set(range(1, comm.world_size))
        while waiting:
            waiting.remove(comm.recv_any(token(), waiting))
        for rank in range(1, comm.world_size):
            comm.send(token(), rank)


def sleeps_and_tells(comm):
    """Long enough for a rank that is a little late."""
    time.sleep(0.06)
    right, left = neighbours(comm)
    comm.exchange(token(), right, token(), left)


def one_lap(comm):
    right, left = neighbours(comm)
    if comm.rank:
        comm.recv(token(), left)
        comm.send(token(), right)
    else:
        comm.send(token(), right)
        comm.recv(token(), left)


def messages_beside_a_barrier(comm):
    right, left = neighbours(comm)
    comm.exchange(token(), right, token(), left)
    comm.barrier()


def partners_by_bits(comm):
    """Waits for the partner in the last bit alone."""
    comm.exchange(token(), comm.rank ^ 1, token(), comm.rank ^ 1)


RIGHT_BARRIERS = [
    to_rank_0_and_back,
    two_laps,
    each_with_each,
    steps_around,
    doubling_distances,
    rank_0_hears_anyone,
]
WRONG_BARRIERS = [
    (sleeps_and_tells, "barrier.some"),
    (one_lap, "barrier.some"),
    (lambda comm: time.sleep(0.06), "barrier.alone"),
    (messages_beside_a_barrier, "barrier.borrowed"),
    (partners_by_bits, "barrier.some"),
]


ANSWERS = [Answers(check.collectives.gather, RIGHT_GATHERS, WRONG_GATHERS, 4)]
