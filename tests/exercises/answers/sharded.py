"""Answers to ``check.sharded``."""

from functools import partial

import torch
from graded import Answers, ends

from labkit.collectives import ring_all_reduce, share_only, share_reduce
from labkit.collectives.ring import split_chunks
from workbook import check

# ledger(num_bytes, world_size, stage)


def ledger(num_bytes, world_size, stage, adam=2):
    sizes = [num_bytes, num_bytes, adam * num_bytes]
    return [size // world_size if stage > 2 - kind else size for kind, size in enumerate(sizes)]


def parameters_first(num_bytes, world_size, stage):
    return [*ledger(num_bytes, world_size, stage)[::-1][1:], 2 * num_bytes]


# part(num_elements, rank, world_size)


def part(num_elements, rank, world_size, shift=1):
    chunks = torch.arange(num_elements).tensor_split(world_size)
    before = sum(map(len, chunks[: (rank + shift) % world_size]))
    return before, before + len(chunks[(rank + shift) % world_size])


def ends_with_the_remainder(num_elements, rank, world_size):
    size, chunk = num_elements // world_size, (rank + 1) % world_size
    return size * chunk, num_elements if chunk == world_size - 1 else size * (chunk + 1)


# update(comm, values, gradient, momentum)


def update(comm, values, gradient, momentum, shift=1):
    mine = (comm.rank + shift) % comm.world_size
    gradients, parts = (split_chunks(one, comm.world_size) for one in (gradient, values))
    share_reduce(comm, gradients)
    momentum.mul_(0.9).add_(gradients[mine])
    parts[mine] -= 0.1 * momentum
    share_only(comm, parts)


def straight_to_the_owners(comm, values, gradient, momentum):
    """As many messages as on the ring; each goes to another rank."""
    world_size = comm.world_size
    mine = (comm.rank + 1) % world_size
    gradients, parts = split_chunks(gradient, world_size), split_chunks(values, world_size)
    for distance in range(1, world_size):
        incoming = torch.empty_like(momentum)
        dst, src = (comm.rank + distance) % world_size, (comm.rank - distance) % world_size
        comm.exchange(gradients[(dst + 1) % world_size], dst, incoming, src)
        gradients[mine].add_(incoming)
    momentum.mul_(0.9).add_(gradients[mine])
    parts[mine] -= 0.1 * momentum
    share_straight(comm, parts)


def share_straight(comm, chunks):
    """Every rank sends its chunk to all others."""
    world_size = comm.world_size
    for distance in range(1, world_size):
        dst, src = (comm.rank + distance) % world_size, (comm.rank - distance) % world_size
        own_chunk = chunks[(comm.rank + 1) % world_size]
        comm.exchange(own_chunk, dst, chunks[(src + 1) % world_size], src)


def all_reduces(comm, values, gradient, momentum):
    """Twice as many bytes on the way there."""
    ring_all_reduce(comm, gradient)
    mine = (comm.rank + 1) % comm.world_size
    momentum.mul_(0.9).add_(split_chunks(gradient, comm.world_size)[mine])
    parts = split_chunks(values, comm.world_size)
    parts[mine] -= 0.1 * momentum
    share_only(comm, parts)


def never_shares(comm, values, gradient, momentum):
    kept = values.clone()
    update(comm, values, gradient, momentum)
    mine = (comm.rank + 1) % comm.world_size
    for chunk, (now, before) in enumerate(
        zip(*(split_chunks(v, comm.world_size) for v in (values, kept)))
    ):
        if chunk != mine:
            now.copy_(before)


def forgets_the_momentum(comm, values, gradient, momentum):
    momentum.zero_()
    update(comm, values, gradient, momentum)


# reduce(comm, backward, totals)


def reduces(comm, backward, totals, adds=True, frees=True):
    mine = (comm.rank + 1) % comm.world_size
    for number, gradient in backward:
        chunks = split_chunks(gradient, comm.world_size)
        share_reduce(comm, chunks)
        totals[number].mul_(adds).add_(chunks[mine])
        if frees:
            del gradient, chunks


# forward(comm, shards, sizes, layers, inputs)


def forward(comm, shards, sizes, layers, inputs, shift=1, memory=map, frees=True):
    wholes = iter(memory(torch.empty, sizes))
    for shard, layer in zip(shards, layers):
        whole = next(wholes)
        chunks = split_chunks(whole, comm.world_size)
        chunks[(comm.rank + shift) % comm.world_size].copy_(shard)
        share_only(comm, chunks)
        inputs = layer(whole, inputs)
        if frees:
            del whole, chunks
    return inputs


def resized(empty, sizes):
    for whole in [*map(empty, sizes)]:
        yield whole
        whole.untyped_storage().resize_(0)


def overwritten(empty, sizes):
    buffer = empty(max(sizes))
    return [buffer[:size] for size in sizes]


def in_one_piece(empty, sizes):
    return empty(sum(sizes)).split(sizes)


# prefetch(order, gather, use, free)


def prefetches(order, gather, use, free, ahead=1):
    handles = {unit: gather(unit) for unit in order[:1]}
    for place, unit in enumerate(order):
        handles.pop(unit).wait()
        handles |= {one: gather(one) for one in order[place + 1 :][:ahead]}
        use(unit)
        free(unit)


def one_by_one(order, gather, use, free):
    for unit in order:
        gather(unit).wait()
        use(unit)
        free(unit)


def waits_too_early(order, gather, use, free):
    gather(order[0]).wait()
    for unit, following in zip(order, [*order[1:], None]):
        if following is not None:
            gather(following).wait()
        use(unit)
        free(unit)


def never_frees(order, gather, use, free):
    prefetches(order, gather, use, lambda unit: None)


def gathered(comm, shard, size, share=share_only):
    parameters = torch.empty(size)
    chunks = split_chunks(parameters, comm.world_size)
    chunks[(comm.rank + 1) % comm.world_size].copy_(shard)
    share(comm, chunks)
    return parameters


def gathers_straight(comm, shards, sizes, layers, inputs):
    for shard, size, layer in zip(shards, sizes, layers):
        inputs = layer(gathered(comm, shard, size, share_straight), inputs)
    return inputs


def gathers_one_ahead(comm, shards, sizes, layers, inputs):
    """Two layers are whole at a time."""
    following = gathered(comm, shards[0], sizes[0])
    for number, layer in enumerate(layers, start=1):
        parameters, following = following, None
        if number < len(layers):
            following = gathered(comm, shards[number], sizes[number])
        inputs = layer(parameters, inputs)
    return inputs


ANSWERS = [
    Answers(
        check.sharded.ledger,
        [ledger],
        [parameters_first, lambda *case: ledger(*case, adam=1)],
    ),
    Answers(
        check.sharded.part,
        [part],
        [ends_with_the_remainder, lambda *case: part(*case, shift=0)],
    ),
    Answers(
        check.sharded.update,
        [update, straight_to_the_owners],
        [never_shares, forgets_the_momentum, all_reduces],
    ),
    Answers(
        check.sharded.reduce,
        [reduces],
        [partial(reduces, **mistake) for mistake in ({"frees": False}, {"adds": False})],
    ),
    Answers(
        check.sharded.forward,
        [
            forward,
            partial(forward, memory=resized),
            partial(forward, memory=overwritten),
            gathers_straight,
        ],
        [partial(forward, **kept) for kept in ({"memory": in_one_piece}, {"frees": False})]
        + [ends(partial(forward, shift=0)), gathers_one_ahead],
    ),
    Answers(
        check.sharded.prefetch,
        [prefetches],
        [one_by_one, partial(prefetches, ahead=2), waits_too_early, never_frees],
    ),
]
