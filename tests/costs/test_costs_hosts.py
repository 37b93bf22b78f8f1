"""All-reduce over hosts on paper: the closed forms of equal hosts, and which way is shorter.

The bytes of real runs are compared in tests/collectives/test_hierarchical_all_reduce.py.
"""

import pytest

from labkit.costs import (
    Link,
    all_reduce_seconds,
    card_bytes,
    hierarchical_all_reduce_cost,
    hosts_all_reduce_seconds,
    ring_all_reduce_cost,
)
from labkit.costs.traffic import Cost

INSIDE, CARD = Link(1e-5, 1e-9, 3e-10), Link(2e-4, 8e-9, 2e-10)


def in_order(num_hosts, size):
    return tuple(tuple(range(h * size, (h + 1) * size)) for h in range(num_hosts))


def dealt_out(num_hosts, size):
    return tuple(tuple(range(h, num_hosts * size, num_hosts)) for h in range(num_hosts))


@pytest.mark.parametrize(("num_hosts", "size"), [(2, 2), (2, 4), (3, 2), (4, 1)])
def test_equal_hosts_have_closed_forms(num_hosts, size):
    hosts, ranks, n = in_order(num_hosts, size), num_hosts * size, 2400
    for rank in range(ranks):
        steps = 2 * (size - 1) + 2 * (num_hosts - 1)
        inside, between = 2 * (size - 1) * n // size, 2 * (num_hosts - 1) * n // ranks
        cost = hierarchical_all_reduce_cost(n, 4, hosts, rank)
        assert cost == Cost(steps, steps, 4 * (inside + between))
    across = 2 * (num_hosts - 1) * n * 4 // num_hosts
    assert card_bytes("hierarchical", n, 4, hosts) == [across] * num_hosts
    assert card_bytes("ring", n, 4, hosts) == [2 * (ranks - 1) * n * 4 // ranks] * num_hosts
    dealt = card_bytes("ring", n, 4, dealt_out(num_hosts, size))
    assert dealt == [size * 2 * (ranks - 1) * n * 4 // ranks] * num_hosts


@pytest.mark.parametrize(("num_hosts", "size"), [(2, 2), (2, 4), (3, 2), (2, 1)])
def test_seconds_of_equal_hosts(num_hosts, size):
    ranks, s = num_hosts * size, 1e6
    steps, add = 2 * (ranks - 1), (ranks - 1) * s / ranks * CARD.gamma_s_per_byte
    for crossing, hosts in ((1, in_order(num_hosts, size)), (size, dealt_out(num_hosts, size))):
        slowest = max(
            0 if crossing == size else INSIDE.message_seconds(s / ranks),
            CARD.message_seconds(crossing * s / ranks),
        )
        inside_add = (ranks - 1) * s / ranks * INSIDE.gamma_s_per_byte
        expected = steps * slowest + max(add, inside_add if crossing < size else 0)
        found = hosts_all_reduce_seconds("ring", s, hosts, INSIDE, CARD)
        assert found == pytest.approx(expected)
    inside = 2 * (size - 1) * INSIDE.message_seconds(s / size)
    inside += (size - 1) * s / size * INSIDE.gamma_s_per_byte
    between = 2 * (num_hosts - 1) * CARD.message_seconds(s / num_hosts)
    between += (num_hosts - 1) * s / ranks * CARD.gamma_s_per_byte
    found = hosts_all_reduce_seconds("hierarchical", s, in_order(num_hosts, size), INSIDE, CARD)
    assert found == pytest.approx(inside + between)


@pytest.mark.parametrize("hosts", [in_order(1, 4), in_order(4, 1), in_order(1, 1)])
def test_with_one_kind_of_link_it_is_the_flat_ring(hosts):
    ranks = sum(map(len, hosts))
    for rank in range(ranks):
        cost = hierarchical_all_reduce_cost(1003, 2, hosts, rank, partial_bytes=4)
        assert cost == ring_all_reduce_cost(1003, 2, ranks, rank, partial_bytes=4)
    for algorithm in ("ring", "hierarchical"):
        found = hosts_all_reduce_seconds(algorithm, 1e6, hosts, CARD, CARD)
        assert found == pytest.approx(all_reduce_seconds("ring", 1e6, ranks, CARD))


def test_compression_is_of_what_travels_between_hosts():
    hosts, n = ((0, 1), (2, 3)), 1000
    exact, half, few = (
        hierarchical_all_reduce_cost(n, 4, hosts, compress=c) for c in (None, "fp16", "topk")
    )
    assert exact.num_bytes - half.num_bytes == 2 * 250 * 2
    # 1 % of 500 elements and their indices, once to the other host.
    assert few == Cost(3, 3, 2 * 500 * 4 + 2 * 5 * 4)
    assert card_bytes("hierarchical", n, 4, hosts, compress="bf16") == [2000, 2000]
    assert card_bytes("hierarchical", n, 4, hosts, compress="topk") == [80, 80]
