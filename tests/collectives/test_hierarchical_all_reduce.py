"""All-reduce over hosts: one device's result on every rank, at the cost of the formula."""

import pytest
import torch
from cases import OPS, paid, values_of
from ranks import travel_by_value

from labkit import run
from labkit.collectives import (
    Reduction,
    fast_hierarchical_all_reduce,
    hierarchical_all_reduce,
)
from labkit.comm.shared_memory import SEGMENT_BYTES
from labkit.costs import card_bytes, hierarchical_all_reduce_cost
from labkit.schedules.hierarchical import host_of

travel_by_value(__name__)

# By world size. The last but one has its ranks dealt out in turn.
HOSTS = {
    1: [((0,),)],
    2: [((0,), (1,)), ((0, 1),)],
    3: [((0,), (1, 2)), ((0, 1), (2,)), ((0, 1, 2),), ((0,), (1,), (2,))],
    4: [
        ((0, 1), (2, 3)),
        ((0, 1, 2), (3,)),
        ((0,), (1, 2), (3,)),
        ((0, 2), (1, 3)),
        ((3, 0), (2, 1)),
    ],
}
SIZES = (0, 1, 3, 7, 1000)
# How a dtype is handled does not depend on the size.
FEW = {torch.float16: "mean", torch.float64: "sum", torch.int64: "max"}
CASES = [
    (dtype, op, size)
    for dtype, ops in OPS.items()
    for op in ops
    for size in SIZES
    if size == 7 or FEW.get(dtype) == op
]
# More than one column of segments, and a last one that is not full.
LARGE = [(torch.float32, "sum", 2 * SEGMENT_BYTES + 13), (torch.bfloat16, "mean", SEGMENT_BYTES)]


def reduced(comm, hosts, cases):
    """By case, the result and the price of the readable one, and what is wrong with the fast one.

    The bytes between hosts, by peer, are those of the readable one.
    """
    comm.hosts, found, crossed = hosts, [], []
    for dtype, op, size in cases:
        before = comm.bytes_to
        slow, price = paid(comm, hierarchical_all_reduce, values_of(comm.rank, size, dtype), op)
        crossed.append(
            sum(n for peer, n in (comm.bytes_to - before).items() if peer not in hosts[comm.host])
        )
        fast, cost = paid(
            comm, fast_hierarchical_all_reduce, values_of(comm.rank, size, dtype), op
        )
        same = torch.equal(slow.view(torch.uint8), fast.view(torch.uint8)) and cost == price
        found.append((slow, price, same))
    return found, crossed


@pytest.mark.parametrize("world_size", HOSTS)
def test_every_rank_gets_the_bits_of_rank_0_at_the_price_of_the_formula(world_size):
    def all_hosts(comm):
        return [reduced(comm, hosts, CASES + LARGE) for hosts in HOSTS[comm.world_size]]

    by_rank = run(all_hosts, world_size=world_size).values
    for number, hosts in enumerate(HOSTS[world_size]):
        firsts, _ = by_rank[0][number]
        left = [[0] * len(hosts) for _ in firsts]
        for rank, found in enumerate(by_rank):
            cases, crossed = found[number]
            for index, (dtype, op, size) in enumerate(CASES + LARGE):
                value, price, same = cases[index]
                assert same, (hosts, dtype, op, size, rank)
                assert torch.equal(value.view(torch.uint8), firsts[index][0].view(torch.uint8))
                wide = Reduction.of(op, value).wide.itemsize
                counts = size, dtype.itemsize, hosts
                assert price == hierarchical_all_reduce_cost(*counts, rank, wide), counts
                left[index][host_of(rank, hosts)] += crossed[index]
        for (dtype, op, size), bytes_left in zip(CASES + LARGE, left):
            wide = Reduction.of(op, torch.empty(0, dtype=dtype)).wide.itemsize
            assert bytes_left == card_bytes("hierarchical", size, dtype.itemsize, hosts, wide)
