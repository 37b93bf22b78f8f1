"""Predicted seconds against the papers' closed forms."""

import math

import pytest

from labkit.costs.link import Link
from labkit.costs.seconds import all_reduce_seconds, crossover_bytes, parameter_server_seconds

S = 12 * 35 * 4


def test_predicted_seconds_are_the_papers():
    a, b, g = 1e-5, 1e-9, 2e-10
    link = Link(a, b, g)
    assert all_reduce_seconds("naive", S, 4, link) == pytest.approx(6 * a + 6 * S * b + 3 * S * g)
    assert all_reduce_seconds("tree", S, 8, link) == pytest.approx(3 * (a + S * b + S * g))
    assert all_reduce_seconds("tree", S, 6, link) == pytest.approx(4 * (a + S * b) + 3 * S * g)
    ring = 6 * a + 1.5 * S * b + 0.75 * S * g
    assert all_reduce_seconds("ring", S, 4, link) == pytest.approx(ring)
    for algorithm in ("naive", "tree", "ring"):
        assert all_reduce_seconds(algorithm, S, 1, link) == 0


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 8, 16, 100])
def test_tree_wins_below_the_crossover_and_ring_above(world_size):
    link = Link(20e-6, 1e-9, 2e-10)
    size = crossover_bytes(world_size, link)
    assert 0 < size < math.inf

    def lead_s(num_bytes):
        ring_s = all_reduce_seconds("ring", num_bytes, world_size, link)
        return ring_s - all_reduce_seconds("tree", num_bytes, world_size, link)

    assert lead_s(0.9 * size) > 0 > lead_s(1.1 * size)
    assert lead_s(size) == pytest.approx(0, abs=1e-12)


def test_crossover_at_the_ends():
    assert crossover_bytes(2, Link(1e-5, 1e-9)) == math.inf
    assert crossover_bytes(4, Link(1e-5, 0)) == math.inf
    assert crossover_bytes(4, Link(0, 1e-9)) == 0
    assert crossover_bytes(1, Link(1e-5, 1e-9)) == 0
    assert crossover_bytes(2, Link(1e-5, 1e-9, 1e-9)) == pytest.approx(2e4)


def test_seconds_of_a_parameter_server_on_paper():
    a, b, g = 1e-5, 1e-9, 2e-10
    link = Link(a, b, g)
    one = parameter_server_seconds(S, 3, 1, link)
    assert one == pytest.approx(6 * a + 6 * S * b + 2 * S * g)
    two = parameter_server_seconds(S, 4, 2, link)
    assert two == pytest.approx(8 * a + 8 * S / 2 * b + 3 * S / 2 * g)
    # A worker's own link is the limit from as many servers as workers on.
    plain = Link(0, b)
    times = [parameter_server_seconds(S, 4, servers, plain) for servers in (1, 2, 4, 8)]
    assert times == pytest.approx([8 * S * b, 4 * S * b, 2 * S * b, 2 * S * b])
    # One server of W workers is the naive all-reduce of W + 1 ranks.
    naive = all_reduce_seconds("naive", S, 4, plain)
    assert parameter_server_seconds(S, 3, 1, plain) == pytest.approx(naive)


def test_what_cannot_be_predicted_is_named():
    link = Link(1e-5, 1e-9)
    with pytest.raises(ValueError, match="'star': choose one of naive, tree, ring"):
        all_reduce_seconds("star", 1, 2, link)
    with pytest.raises(ValueError, match="give 1 or more"):
        crossover_bytes(0, link)
    with pytest.raises(ValueError, match="0 workers, 1 server: give"):
        parameter_server_seconds(S, 0, 1, link)
    with pytest.raises(ValueError, match="-1 bytes"):
        all_reduce_seconds("ring", -1, 2, link)
