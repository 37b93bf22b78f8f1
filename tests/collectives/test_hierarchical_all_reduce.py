"""All-reduce over hosts: one device's result on every rank, at the cost of the formula."""

import pytest
import torch
from cases import OPS, bits, on_one_device, paid, values_of, wide_bytes

from labkit import EmulatedLink, run
from labkit.collectives import (
    fast_hierarchical_all_reduce,
    hierarchical,
    hierarchical_all_reduce,
    ring_all_reduce,
)
from labkit.collectives.compressed import all_reduce_of
from labkit.costs import card_bytes

# By world size. Ranks may also be dealt out in turn, and stand in any order.
HOSTS = {
    2: [((0,), (1,)), ((0, 1),)],
    3: [((0,), (1, 2)), ((0, 1), (2,))],
    4: [((0, 1), (2, 3)), ((0,), (1, 2), (3,)), ((3, 0), (2, 1))],
}
# How a dtype is handled does not depend on the size, nor the pieces on the dtype.
CASES = [(dtype, op, 7) for dtype, ops in OPS.items() for op in (ops[0], ops[-1])]
CASES += [(torch.float16, "mean", size) for size in (0, 1, 3, 1000)]
CASES += [(torch.float64, "mean", 1000), (torch.int64, "max", 0), (torch.bool, "bor", 1)]
BOTH = hierarchical_all_reduce, fast_hierarchical_all_reduce


def reduced(comm, hosts):
    """By case: a hash of the bits, the bytes to other hosts and inside, and what is wrong."""
    comm.hosts, found = hosts, []
    for dtype, op, size in CASES:
        before, wrong, results, costs = comm.bytes_to, [], [], []
        for all_reduce in BOTH:
            result, cost = paid(comm, all_reduce, values_of(comm.rank, size, dtype), op)
            results.append(result)
            costs.append(cost)
        wrong += [costs] * (costs[0] != costs[1])
        sent = comm.bytes_to - before
        left = sum(n for peer, n in sent.items() if peer not in hosts[comm.host])
        expected = on_one_device(op, dtype, size, comm.world_size)
        near = 1e-2 if dtype.itemsize == 2 else 1e-5
        wrong += ["bits"] * (bits(results[0]) != bits(results[1]))
        wrong += ["result"] * (not torch.allclose(results[0], expected, rtol=near, atol=near))
        inside = costs[0].num_bytes - left // 2
        found.append((hash(bits(results[0])), left // 2, inside, wrong))
    return found


@pytest.mark.parametrize("world_size", HOSTS)
def test_every_rank_gets_one_devices_result_at_the_price_of_the_formula(world_size):
    def over_all_hosts(comm):
        return [reduced(comm, hosts) for hosts in HOSTS[comm.world_size]]

    by_rank = run(over_all_hosts, world_size=world_size).values
    for number, hosts in enumerate(HOSTS[world_size]):
        for index, (dtype, op, size) in enumerate(CASES):
            of_ranks = [found[number][index] for found in by_rank]
            assert [wrong for *_, wrong in of_ranks] == [[]] * world_size, (hosts, dtype, op, size)
            assert len({hashed for hashed, *_ in of_ranks}) == 1, (hosts, dtype, op, size)
            wide = wide_bytes(op, dtype)
            left = [sum(of_ranks[rank][1] for rank in ranks) for ranks in hosts]
            # Partial sums travel wide, and results do not.
            prices = [card_bytes("hierarchical", size, n, hosts) for n in (wide, dtype.itemsize)]
            assert 2 * sum(left) == sum(map(sum, prices)), (hosts, dtype, op, size)
            assert wide > dtype.itemsize or left == prices[0], (hosts, dtype, op, size)
            inside = [sum(of_ranks[rank][2] for rank in ranks) for ranks in hosts]
            both = size * (wide + dtype.itemsize)
            assert inside == [(len(ranks) - 1) * both for ranks in hosts], (hosts, dtype, op, size)


# A block of four has up to 250 elements, and the last slice may be smaller.
IN_SLICES = [
    (torch.float32, "mean", 1001, 4 * 50, 6),
    (torch.bfloat16, "mean", 1003, 4 * 100, 3),
    (torch.int32, "max", 9, 4, 3),
    (torch.float64, "sum", 0, 8, 1),
]


def all_in_slices(comm):
    found = []
    for dtype, op, size, block_bytes, _ in IN_SLICES:
        hierarchical.BLOCK_BYTES = block_bytes
        (slow, price), (fast, cost) = (
            paid(comm, all_reduce, values_of(comm.rank, size, dtype), op) for all_reduce in BOTH
        )
        near = torch.allclose(slow, fast, rtol=1e-2 if dtype.itemsize == 2 else 1e-5)
        same = near and price.num_bytes == cost.num_bytes
        found.append((same, hash(bits(fast)), cost.messages / price.messages))
    return found


@pytest.mark.parametrize("settings", [{}, {"transport": "gloo"}])
def test_slices_change_the_number_of_messages_and_nothing_else(settings):
    link = EmulatedLink(ranks_per_host=2)
    by_rank = run(all_in_slices, world_size=4, link=link, **settings).values
    for case, of_ranks in zip(IN_SLICES, zip(*by_rank)):
        assert [same for same, *_ in of_ranks] == [True] * 4, case
        assert len({hashed for _, hashed, _ in of_ranks}) == 1, case
        assert {count for *_, count in of_ranks} == {case[-1]}, case


def as_on_one_kind_of_link(comm):
    same = []
    for comm.hosts in (((0, 1, 2),), ((0,), (1,), (2,))):
        ring, over, fast = (values_of(comm.rank, 1001, torch.float32) for _ in range(3))
        ring_all_reduce(comm, ring, "mean")
        hierarchical_all_reduce(comm, over, "mean")
        fast_hierarchical_all_reduce(comm, fast, "mean")
        same.append(torch.equal(ring, over) and torch.equal(ring, fast))
    return same


def test_with_one_host_or_one_rank_per_host_it_has_the_rings_bits():
    assert run(as_on_one_kind_of_link, world_size=3).values == [[True, True]] * 3


def compressed(comm, hosts, rounds):
    """By compression: the sums of results and inputs, the bytes to other hosts."""
    comm.hosts, found = hosts, {}
    for compress in ("fp16", "bf16"):
        reduce, before = all_reduce_of(compress, hierarchical=True), comm.bytes_to
        got, given = torch.zeros(300), torch.zeros(300)
        for number in range(rounds):
            gradient = values_of(10 * number + comm.rank, 300, torch.float32)
            given += gradient
            got += reduce(comm, gradient.clone())
        sent = comm.bytes_to - before
        left = sum(n for peer, n in sent.items() if peer not in hosts[comm.host])
        found[compress] = got, given, left
    return found


@pytest.mark.parametrize("hosts", [((0, 1), (2,)), ((0, 1), (2, 3))])
def test_compressed_between_hosts_only(hosts):
    rounds, ranks = 20, sum(map(len, hosts))
    by_rank = run(compressed, hosts, rounds, world_size=ranks).values
    for compress, exact in (("fp16", 2**-9), ("bf16", 2**-6)):
        first, *_ = by_rank[0][compress]
        given = sum(found[compress][1] for found in by_rank)
        assert all(torch.equal(found[compress][0], first) for found in by_rank)
        assert bool(((first - given).abs() <= exact * rounds * 4).all())
        left = [sum(by_rank[rank][compress][2] for rank in on_host) for on_host in hosts]
        halved = card_bytes("hierarchical", 300, 2, hosts)
        assert left == [rounds * num_bytes for num_bytes in halved]
