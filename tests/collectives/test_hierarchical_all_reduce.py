"""All-reduce over hosts: one device's result on every rank, at the cost of the formula."""

import functools

import pytest
import torch
from cases import OPS, paid, values_of
from ranks import travel_by_value

from labkit import EmulatedLink, run
from labkit.collectives import (
    Reduction,
    fast_hierarchical,
    fast_hierarchical_all_reduce,
    hierarchical_all_reduce,
    ring_all_reduce,
)
from labkit.collectives.compressed import all_reduce_of
from labkit.comm.deadlock import latest_collectives
from labkit.comm.shared_memory import SEGMENT_BYTES
from labkit.costs import card_bytes

travel_by_value(__name__)

# By world size. Ranks may also be dealt out in turn, and stand in any order.
HOSTS = {
    1: [((0,),)],
    2: [((0,), (1,)), ((0, 1),)],
    3: [((0,), (1, 2)), ((0, 1), (2,)), ((0, 1, 2),), ((0,), (1,), (2,))],
    4: [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2), (3,)), ((3, 0), (2, 1))],
}
# How a dtype is handled does not depend on the size, nor the pieces on the dtype.
CASES = [(dtype, op, 7) for dtype, ops in OPS.items() for op in (ops[0], ops[-1])]
CASES += [(torch.float16, "mean", size) for size in (0, 1, 3, 1000)]
CASES += [(torch.float64, "mean", 1000), (torch.int64, "max", 0), (torch.bool, "bor", 1)]
# More than one column of segments, and a last one that is not full.
CASES += [(torch.float32, "sum", SEGMENT_BYTES + 13), (torch.bfloat16, "mean", SEGMENT_BYTES // 2)]


def wide_bytes(op, dtype):
    return Reduction.of(op, torch.empty(0, dtype=dtype)).wide.itemsize


def expected_of(op, dtype, size, world_size):
    """On one device; 16-bit floats in float32."""
    combine = {"sum": torch.add, "mean": torch.add, "product": torch.mul}
    combine |= {"max": torch.maximum, "bxor": torch.bitwise_xor, "bor": torch.bitwise_or}
    everyones = [values_of(rank, size, dtype) for rank in range(world_size)]
    wide = Reduction.of(op, everyones[0]).wide
    total = functools.reduce(combine[op], [values.to(wide) for values in everyones])
    return (total / world_size if op == "mean" else total).to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def reduced(comm, hosts):
    """By case: the hash of its bits, the bytes to other hosts and inside, and what is wrong."""
    comm.hosts, found = hosts, []
    for dtype, op, size in CASES:
        before, wrong = comm.bytes_to, []
        slow, price = paid(comm, hierarchical_all_reduce, values_of(comm.rank, size, dtype), op)
        sent = comm.bytes_to - before
        left = sum(n for peer, n in sent.items() if peer not in hosts[comm.host])
        inside = price.num_bytes - left
        fast, cost = paid(
            comm, fast_hierarchical_all_reduce, values_of(comm.rank, size, dtype), op
        )
        expected = expected_of(op, dtype, size, comm.world_size)
        if price != cost:
            wrong.append((price, cost))
        wrong += ["bits of the fast one"] * (bits(slow) != bits(fast))
        near = 1e-2 if dtype.itemsize == 2 else 1e-5
        if not torch.allclose(slow, expected, rtol=near, atol=near):
            wrong.append("the result")
        found.append((hash(bits(slow)), left, inside, wrong))
    return found


@pytest.mark.parametrize("world_size", HOSTS)
def test_every_rank_gets_one_devices_result_at_the_price_of_the_formula(world_size):
    def over_all_hosts(comm):
        return [reduced(comm, hosts) for hosts in HOSTS[comm.world_size]]

    by_rank = run(over_all_hosts, world_size=world_size).values
    for number, hosts in enumerate(HOSTS[world_size]):
        for index, case in enumerate(CASES):
            of_ranks = [found[number][index] for found in by_rank]
            assert [wrong for *_, wrong in of_ranks] == [[]] * world_size, (hosts, case)
            assert len({hashed for hashed, *_ in of_ranks}) == 1, (hosts, case)
            dtype, op, size = case
            wide = wide_bytes(op, dtype)
            left = [sum(of_ranks[rank][1] for rank in ranks) for ranks in hosts]
            assert left == card_bytes("hierarchical", size, dtype.itemsize, hosts, wide), case
            inside = [sum(of_ranks[rank][2] for rank in ranks) for ranks in hosts]
            both = size * (wide + dtype.itemsize)
            assert inside == [(len(ranks) - 1) * both for ranks in hosts], (hosts, case)


def in_segments(comm, dtype, op, size, segment_bytes):
    """Whether bits and bytes are the readable one's, what ranks share, the messages of both."""
    fast_hierarchical.SEGMENT_BYTES = segment_bytes
    slow, price = paid(comm, hierarchical_all_reduce, values_of(comm.rank, size, dtype), op)
    fast, cost = paid(comm, fast_hierarchical_all_reduce, values_of(comm.rank, size, dtype), op)
    same = bits(slow) == bits(fast) and price.num_bytes == cost.num_bytes
    meetings = int(comm.session.board.ranks[comm.rank]["meetings"])
    return same, (hash(bits(fast)), meetings), price.messages, cost.messages


# The longest block of four has 250, 251 or 3 elements of 4 bytes.
SEGMENTED = [
    (torch.float32, "sum", 1000, 4 * 50, 5),
    (torch.float32, "mean", 1001, 4 * 50, 6),
    (torch.bfloat16, "mean", 1003, 4 * 100, 3),
    (torch.int32, "max", 9, 4, 3),
    (torch.int32, "sum", 1000, 4 * 250, 1),
    (torch.float64, "sum", 0, 8, 1),
]


def all_in_segments(comm):
    return [in_segments(comm, *case[:4]) for case in SEGMENTED]


@pytest.mark.parametrize("settings", [{}, {"transport": "gloo"}])
def test_segments_change_the_messages_between_hosts_and_nothing_else(settings):
    link = EmulatedLink(ranks_per_host=2)
    by_rank = run(all_in_segments, world_size=4, link=link, **settings).values
    for case, of_ranks in zip(SEGMENTED, zip(*by_rank)):
        assert [same for same, *_ in of_ranks] == [True] * 4, case
        # All ranks have the same bits, and have come to equally many meetings.
        assert len({equal for _, equal, *_ in of_ranks}) == 1, case
        count = case[-1]
        # Through gloo the messages inside a host are segments, too: of two blocks each.
        inside = 2 if count == 1 or not settings else 2 * 2 * count
        assert [number for *_, number in of_ranks] == [inside + 2 * count] * 4, case
        assert [number for *_, number, _ in of_ranks] == [2 + 2] * 4


def as_on_one_kind_of_link(comm):
    """Whether the result has the ring's bits, by hosts; and the name on the board."""
    found = {}
    for hosts in (((0, 1, 2),), ((0,), (1,), (2,))):
        comm.hosts = hosts
        ring, over, fast = (values_of(comm.rank, 1001, torch.float32) for _ in range(3))
        ring_all_reduce(comm, ring, "mean")
        hierarchical_all_reduce(comm, over, "mean")
        fast_hierarchical_all_reduce(comm, fast, "mean")
        found[hosts] = torch.equal(ring, over) and torch.equal(ring, fast)
    comm.hosts = ((0, 1), (2,))
    hierarchical_all_reduce(comm, torch.ones(2))
    return found, latest_collectives(comm.session.board, comm.rank, length=1)


def test_with_one_host_or_one_rank_per_host_it_has_the_rings_bits():
    for found, name in run(as_on_one_kind_of_link, world_size=3).values:
        assert all(found.values()), found
        assert name.endswith("hierarchical_all_reduce float32 [2] sum")


# Compressed between hosts


def compressed(comm, hosts, rounds):
    """By compression: the sums of results and inputs, the residual, the bytes to other hosts."""
    comm.hosts, found = hosts, {}
    for compress in ("fp16", "bf16", "topk"):
        reduce, before = all_reduce_of(compress, hierarchical=True), comm.bytes_to
        got, given = torch.zeros(300), torch.zeros(300)
        for number in range(rounds):
            gradient = values_of(10 * number + comm.rank, 300, torch.float32)
            given += gradient
            got += reduce(comm, gradient.clone())
        sent = comm.bytes_to - before
        left = sum(n for peer, n in sent.items() if peer not in hosts[comm.host])
        found[compress] = got, given, reduce.residual, left
    return found


@pytest.mark.parametrize("hosts", [((0, 1), (2,)), ((0, 1), (2, 3))])
def test_compressed_between_hosts_only(hosts):
    rounds, ranks = 20, sum(map(len, hosts))
    by_rank = run(compressed, hosts, rounds, world_size=ranks).values
    for compress, exact in (("fp16", 2**-9), ("bf16", 2**-6), ("topk", None)):
        first, *_ = by_rank[0][compress]
        given = sum(found[compress][1] for found in by_rank)
        assert all(torch.equal(found[compress][0], first) for found in by_rank)
        if exact is None:
            held_back = sum(found[compress][2] for found in by_rank)
            torch.testing.assert_close(first + held_back, given, rtol=1e-4, atol=1e-4)
            # Three elements of a host's sum per ring and round.
            assert 30 < first.count_nonzero() < 300
        else:
            assert bool(((first - given).abs() <= exact * rounds * 4).all())
        left = [sum(by_rank[rank][compress][3] for rank in on_host) for on_host in hosts]
        halved = card_bytes("hierarchical", 300, 2, hosts)
        # A value and its index, around two rings.
        formula = [2 * 2 * 4] * 2 if compress == "topk" else halved
        assert left == [rounds * num_bytes for num_bytes in formula]
