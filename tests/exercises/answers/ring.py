"""Answers to ``check.ring``."""

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit import collectives
from labkit.collectives.ring import split_chunks
from workbook import check

travel_by_value(__name__)


def neighbours(comm):
    return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size


# share_reduce(comm, chunks)


def adds(chunks, i, incoming):
    chunks[i] += incoming


def reduces_in(comm, chunks, steps, first=0, to="right", put=adds):
    """Share-reduce in ``steps`` steps, from chunk ``rank + first`` on."""
    right, left = neighbours(comm)
    dst, src, way = (right, left, -1) if to == "right" else (left, right, 1)
    for step in range(steps):
        chunk = (comm.rank + first + way * step) % comm.world_size
        target = (chunk + way) % comm.world_size
        incoming = torch.empty_like(chunks[target])
        comm.exchange(chunks[chunk], dst, incoming, src)
        put(chunks, target, incoming)


def variant(more=-1, **options):
    """Share-reduce in P + ``more`` steps."""

    def fn(comm, chunks):
        reduces_in(comm, chunks, comm.world_size + more, **options)

    return fn


def overwrites(chunks, i, incoming):
    chunks[i].copy_(incoming)


def makes_new_ones(chunks, i, incoming):
    chunks[i] = chunks[i] + incoming


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


def waits_in_a_row(comm, chunks):
    right, left = neighbours(comm)
    for step in range(comm.world_size - 1):
        chunk = (comm.rank - step) % comm.world_size
        incoming = torch.empty_like(chunks[chunk - 1])
        if comm.rank == 0:
            comm.send(chunks[chunk], right)
        comm.recv(incoming, left)
        if comm.rank:
            comm.send(chunks[chunk], right)
        chunks[chunk - 1] += incoming


def all_receive_first(comm, chunks):
    right, left = neighbours(comm)
    comm.recv(torch.empty_like(chunks[comm.rank - 1]), left)
    comm.send(chunks[comm.rank], right)


def divides_its_chunk(comm, chunks):
    collectives.share_reduce(comm, chunks)
    chunks[(comm.rank + 1) % comm.world_size] /= comm.world_size


SHARE_REDUCE = [
    (variant(put=overwrites), "sum.overwritten"),
    (variant(more=-2), "value.unchanged", "messages.one_less"),
    (variant(more=0), "messages.one_more"),
    (variant(first=-1), "chunk.other_complete"),
    (variant(to="left"), "peers.left"),
    (sends_the_wrong_chunk, "chunk.foreign"),
    (sends_the_whole_tensor, "bytes.whole_tensor"),
    (waits_in_a_row, "rounds.in_a_row"),
    (all_receive_first, "run.stuck"),
    (variant(put=makes_new_ones), "value.new_chunks"),
    (divides_its_chunk, "sum.mean"),
]


# share_only(comm, chunks)


def copies(more=-1, first=1, to="right", put=overwrites):
    return variant(more, first=first, to=to, put=put)


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


def stores_one_place_too_far(comm, chunks):
    collectives.share_only(comm, chunks)
    whole = torch.cat([chunks[-1], *chunks[:-1]])
    for chunk, moved in zip(chunks, whole.split([len(chunk) for chunk in chunks])):
        chunk.copy_(moved)


def puts_what_came(chunks, i, incoming):
    chunks[i] = incoming


SHARE_ONLY = [
    (variant(first=1), "copy.added"),
    (copies(more=-2), "value.unchanged"),
    (copies(first=0), "value.unchanged"),
    (copies(to="left"), "peers.left"),
    (copies_the_whole_tensor, "bytes.whole_tensor"),
    (copies(put=puts_what_came), "value.new_chunks"),
    (lambda comm, chunks: None, "traffic.nothing"),
    (stores_one_place_too_far, "value.rotated"),
]


# all_reduce(comm, tensor)


def adds_its_own_again(comm, tensor):
    own = tensor.clone()
    collectives.ring_all_reduce(comm, tensor)
    tensor += own


def stops_the_second_half_early(comm, tensor):
    chunks = split_chunks(tensor, comm.world_size)
    collectives.share_reduce(comm, chunks)
    copies(more=-2)(comm, chunks)


def rotates_and_adds(comm, tensor):
    right, left = neighbours(comm)
    passing = tensor.clone()
    for _ in range(comm.world_size - 1):
        incoming = torch.empty_like(tensor)
        comm.exchange(passing, right, incoming, left)
        tensor += incoming
        passing = incoming


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


def takes_one_dimension_only(comm, tensor):
    P, N = comm.world_size, len(tensor)
    padded = torch.zeros(-(-N // P) * P)
    padded[:N] = tensor
    rows = list(padded.view(P, -1))
    collectives.share_reduce(comm, rows)
    collectives.share_only(comm, rows)
    tensor.copy_(padded[:N])


def cuts_rows_by_the_number_of_elements(comm, tensor):
    chunks = split_chunks(tensor, comm.world_size)
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


def right_but_for_small_ones(comm, tensor):
    before = tensor.clone()
    collectives.ring_all_reduce(comm, tensor)
    if len(tensor) == 2:
        tensor.copy_(before)


RING = [
    (works_in_float16, "sum.rounded"),
    (adds_its_own_again, "sum.own_twice"),
    (
        lambda comm, tensor: collectives.share_reduce(comm, split_chunks(tensor, comm.world_size)),
        "value.unchanged",
    ),
    (stops_the_second_half_early, "sum.lacks_one"),
    (rotates_and_adds, "value.last_bits"),
    (collectives.naive_all_reduce, "peers.bottleneck"),
    (returns_a_new_tensor, "value.new_tensor"),
    (binds_the_name_anew, "value.unchanged"),
    (takes_the_mean, "sum.mean"),
    (drops_the_remainder, "value.size_indivisible"),
    (right_but_for_small_ones, "value.size_below_ranks"),
    (uses_torch_chunk, "run.error"),
    (takes_one_dimension_only, "run.error", "in a tensor of shape [12, 9]"),
    (cuts_rows_by_the_number_of_elements, "in a tensor of shape [12, 9]"),
    (reduces_from_uninitialised_memory, "value.not_finite"),
    (lambda comm, tensor: tensor.zero_(), "value.zeros"),
]


# The other options: the way to the left, and the mean


# weighted_mean(comm, gradient, num_samples)


def packs(comm, gradient, num_samples):
    packed = torch.cat([num_samples * gradient, gradient.new_tensor([num_samples])])
    collectives.ring_all_reduce(comm, packed)
    return packed[:-1] / packed[-1]


def count_first(*, num_samples, gradient, comm):
    packed = torch.empty(len(gradient) + 1, dtype=torch.float64)
    packed[0], packed[1:] = num_samples, gradient.double() * num_samples
    count, *total = collectives.ring_all_reduce(comm, packed).tolist()
    return [number / count for number in total]


def in_numpy(comm, gradient, num_samples):
    mine = np.append(gradient.numpy() * num_samples, np.float32(num_samples))
    total = collectives.ring_all_reduce(comm, torch.from_numpy(mine)).numpy()
    return total[:-1] / total[-1]


def padded(comm, gradient, num_samples):
    ones = torch.nn.functional.pad(gradient, (0, 1), value=1.0)
    total = collectives.ring_all_reduce(comm, ones * num_samples)
    gradient.copy_(total[: len(gradient)]).div_(total[-1])
    return gradient


def by_halves(comm, gradient, num_samples):
    packed = torch.cat([num_samples * gradient, torch.tensor([float(num_samples)])])
    chunks = split_chunks(packed, comm.world_size)
    collectives.share_reduce(comm, chunks)
    collectives.share_only(comm, chunks)
    *total, count = packed
    return (number / count for number in total)


def in_two_rows(comm, gradient, num_samples):
    rows = torch.stack([gradient * num_samples, torch.full_like(gradient, num_samples)])
    total, counts = collectives.ring_all_reduce(comm, rows)
    return total / counts


def then_weighted(change):
    def fn(comm, gradient, num_samples):
        own = gradient.clone()
        collectives.ring_all_reduce(comm, packed := torch.cat([own, own[:1]]))
        total = packed[:-1]
        return change(comm, own, total, num_samples)

    return fn


def sums_samples(comm, gradient, num_samples):
    return collectives.ring_all_reduce(comm, num_samples * gradient)


def divides_by_ranks(comm, gradient, num_samples):
    return sums_samples(comm, gradient, num_samples) / comm.world_size


def divides_means_by_samples(comm, gradient, num_samples):
    packed = torch.cat([gradient, gradient.new_tensor([num_samples])])
    collectives.ring_all_reduce(comm, packed)
    return packed[:-1] / packed[-1]


def two_all_reduces(comm, gradient, num_samples):
    count = collectives.ring_all_reduce(comm, torch.tensor([float(num_samples)]))
    return sums_samples(comm, gradient, num_samples) / count


ANSWERS = [
    Answers(
        check.ring.share_reduce,
        [collectives.share_reduce, variant(), sends_then_receives],
        SHARE_REDUCE,
        4,
    ),
    Answers(check.ring.share_only, [collectives.share_only, copies()], SHARE_ONLY, 4),
    Answers(check.ring.all_reduce, [collectives.ring_all_reduce], RING, 4),
    Answers(
        check.ring.weighted_mean,
        [packs, count_first, in_numpy, padded, by_halves, in_two_rows],
        [
            (
                then_weighted(lambda comm, own, total, n: total / comm.world_size),
                "weighted.ranks_alike",
            ),
            (then_weighted(lambda comm, own, total, n: total), "weighted.sum_of_means"),
            (
                then_weighted(lambda comm, own, total, n: total / (comm.world_size - 1)),
                "weighted.some_ranks_alike",
            ),
            (divides_means_by_samples, "weighted.means_over_samples"),
            (then_weighted(lambda comm, own, total, n: own), "weighted.own"),
            (sums_samples, "weighted.sum"),
            (divides_by_ranks, "weighted.over_ranks"),
            (two_all_reduces, "traffic.off_target"),
        ],
    ),
]
