"""The alpha-beta model: fits, and seconds against the papers' closed forms."""

import pytest

from labkit.costs.link import (
    Link,
    all_reduce_seconds,
    crossover_bytes,
    fit_link,
    hosts_all_reduce_seconds,
    parameter_server_seconds,
)
from labkit.costs.traffic import card_bytes

SIZES = [2**k for k in range(10, 27)]
S = 12 * 35 * 4


@pytest.mark.parametrize(("alpha_s", "beta"), [(50e-6, 3e-10), (1e-6, 2e-11), (0.5, 1e-6)])
def test_a_fit_finds_the_line_it_was_made_from(alpha_s, beta):
    link = fit_link(SIZES, [alpha_s + beta * size for size in SIZES])
    assert link.alpha_s == pytest.approx(alpha_s, rel=1e-6)
    assert link.beta_s_per_byte == pytest.approx(beta, rel=1e-6)


def test_predicted_seconds_are_the_papers():
    a, b, g = 1e-5, 1e-9, 2e-10
    link = Link(a, b, g)
    assert all_reduce_seconds("naive", S, 4, link) == pytest.approx(6 * a + 6 * S * b + 3 * S * g)
    assert all_reduce_seconds("tree", S, 8, link) == pytest.approx(3 * (a + S * b + S * g))
    assert all_reduce_seconds("tree", S, 6, link) == pytest.approx(4 * (a + S * b) + 3 * S * g)
    ring = 6 * a + 1.5 * S * b + 0.75 * S * g
    assert all_reduce_seconds("ring", S, 4, link) == pytest.approx(ring)
    halving = 6 * a + 1.75 * S * b + 0.875 * S * g
    assert all_reduce_seconds("halving_doubling", S, 8, link) == pytest.approx(halving)
    folded = 6 * a + 3.5 * S * b + 1.75 * S * g
    assert all_reduce_seconds("halving_doubling", S, 6, link) == pytest.approx(folded)
    for algorithm in ("naive", "tree", "ring", "halving_doubling"):
        assert all_reduce_seconds(algorithm, S, 1, link) == 0


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_tree_wins_below_the_crossover_and_ring_above(world_size):
    link = Link(20e-6, 1e-9, 2e-10)
    size = crossover_bytes(world_size, link)

    def lead_s(num_bytes):
        ring_s = all_reduce_seconds("ring", num_bytes, world_size, link)
        return ring_s - all_reduce_seconds("tree", num_bytes, world_size, link)

    assert lead_s(0.9 * size) > 0 > lead_s(1.1 * size)


def test_seconds_of_a_parameter_server_on_paper():
    a, b, g = 1e-5, 1e-9, 2e-10
    link = Link(a, b, g)
    one = parameter_server_seconds(S, 3, 1, link)
    assert one == pytest.approx(6 * a + 6 * S * b + 2 * S * g)
    two = parameter_server_seconds(S, 4, 2, link)
    assert two == pytest.approx(8 * a + 8 * S / 2 * b + 3 * S / 2 * g)
    # A worker's own link is the limit from as many servers as workers on.
    times = [parameter_server_seconds(S, 4, servers, Link(0, b)) for servers in (1, 2, 4, 8)]
    assert times == pytest.approx([8 * S * b, 4 * S * b, 2 * S * b, 2 * S * b])


@pytest.mark.parametrize(("num_hosts", "size"), [(2, 2), (2, 4), (3, 2), (2, 1)])
def test_bytes_and_seconds_over_equal_hosts(num_hosts, size):
    inside, card = Link(1e-5, 1e-9, 3e-10), Link(2e-4, 8e-9, 2e-10)
    ranks, s = num_hosts * size, 1e6
    in_order = tuple(tuple(range(h * size, (h + 1) * size)) for h in range(num_hosts))
    dealt = tuple(tuple(range(h, ranks, num_hosts)) for h in range(num_hosts))
    for crossing, hosts in ((1, in_order), (size, dealt)):
        expected = 2 * (ranks - 1) * card.message_seconds(crossing * s / ranks)
        expected += (ranks - 1) * s / ranks * card.gamma_s_per_byte
        found = hosts_all_reduce_seconds("ring", s, hosts, inside, card)
        assert found == pytest.approx(expected)
        over_card = crossing * 2 * (ranks - 1) * 2400 * 4 // ranks
        assert card_bytes("ring", 2400, 4, hosts) == [over_card] * num_hosts
    expected = 2 * (size - 1) * inside.message_seconds(s / size)
    expected += (size - 1) * s / size * inside.gamma_s_per_byte
    expected += 2 * (num_hosts - 1) * card.message_seconds(s / num_hosts)
    expected += (num_hosts - 1) * s / ranks * card.gamma_s_per_byte
    found = hosts_all_reduce_seconds("hierarchical", s, in_order, inside, card)
    assert found == pytest.approx(expected)
