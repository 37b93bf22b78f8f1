"""What is sent, against the textbook's closed forms."""

import pytest

from labkit.costs.traffic import (
    Cost,
    card_bytes,
    gather_cost,
    halving_doubling_cost,
    model_parallel_cost,
    naive_all_reduce_cost,
    parameter_server_cost,
    ring_all_reduce_cost,
    share_only_cost,
    share_reduce_cost,
)

N, ITEM = 12 * 35, 4  # divides by 2 to 7

S = N * ITEM


def over_ranks(cost, world_size, *args, **options):
    return [cost(N, ITEM, world_size, rank, *args, **options) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_all_reduces(world_size):
    others = world_size - 1
    half = Cost(others, others, others * S // world_size)
    assert over_ranks(share_reduce_cost, world_size) == [half] * world_size
    assert over_ranks(share_only_cost, world_size) == [half] * world_size
    assert over_ranks(ring_all_reduce_cost, world_size) == [half + half] * world_size
    naive = over_ranks(naive_all_reduce_cost, world_size)
    assert naive == [Cost(2 * others, others, others * S)] + [Cost(2, 1, S)] * others


@pytest.mark.parametrize("log2", [0, 1, 2, 3])
def test_halving_and_doubling(log2):
    world_size = 2**log2
    elements = 8 * N
    each = Cost(2 * log2, 2 * log2, 2 * (world_size - 1) * elements * ITEM // world_size)
    for rank in range(world_size):
        assert halving_doubling_cost(elements, ITEM, world_size, rank) == each


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_rooted_ones(world_size):
    others = world_size - 1
    for root in {0, others}:
        gather = over_ranks(gather_cost, world_size, root)
        assert gather.pop(root) == Cost(others, 0, 0)
        assert gather == [Cost(1, 1, S)] * others


@pytest.mark.parametrize(("num_hosts", "size"), [(2, 2), (2, 4), (3, 2), (4, 1), (1, 4)])
def test_bytes_over_the_cards_of_equal_hosts(num_hosts, size):
    ranks = num_hosts * size
    in_order = tuple(tuple(range(h * size, (h + 1) * size)) for h in range(num_hosts))
    dealt = tuple(tuple(range(h, ranks, num_hosts)) for h in range(num_hosts))
    flat = 2 * (ranks - 1) * 2400 * 4 // ranks
    across = 2 * (num_hosts - 1) * 2400 * 4 // num_hosts
    for hosts in (in_order, dealt):
        assert card_bytes("hierarchical", 2400, 4, hosts) == [across] * num_hosts
    assert card_bytes("ring", 2400, 4, in_order) == [flat * (num_hosts > 1)] * num_hosts
    assert card_bytes("ring", 2400, 4, dealt) == [size * flat * (num_hosts > 1)] * num_hosts


def test_a_parameter_server_moves_all_workers_bytes():
    assert over_ranks(parameter_server_cost, 4) == [Cost(6, 3, 3 * S)] + [Cost(2, 1, S)] * 3
    two = over_ranks(parameter_server_cost, 6, servers=2)
    assert two == [Cost(8, 4, 2 * S)] * 2 + [Cost(4, 2, S)] * 4
    assert over_ranks(parameter_server_cost, 1) == [Cost(0, 0, 0)]
    # 10 elements on 3 servers: slices of 4, 3 and 3.
    uneven = [parameter_server_cost(10, 8, 5, rank, servers=3).num_bytes for rank in range(5)]
    assert uneven == [2 * 4 * 8, 2 * 3 * 8, 2 * 3 * 8, 80, 80]


def test_a_step_of_stages_sends_what_crosses_the_cuts():
    def steps(cuts, *args, **options):
        ranks = range(len(cuts) + 1)
        return [model_parallel_cost(cuts, 10, r, len(ranks), *args, **options) for r in ranks]

    # The stage in the middle sends an activation on, and a gradient back.
    assert steps([400, 80]) == [Cost(2, 1, 4000), Cost(4, 2, 800 + 4000), Cost(2, 1, 800)]
    # A pipeline's activation out and gradient in, at the same neighbour, are one exchange.
    assert [cost.steps for cost in steps([400, 80], schedule="gpipe")] == [1, 3, 2]
    # Three micro-batches, of 4, 3 and 3 samples. GPipe, stage 1 of 3: F0 in, F0 out, F1 in, F1
    # out, F2 in, F2 out and B0 in at once; then B0 out, B1 in, B1 out, B2 in, B2 out.
    filled = [Cost(5, 3, 4000), Cost(11, 6, 4800), Cost(6, 3, 800)]
    assert steps([400, 80], 3, schedule="gpipe") == filled
    # 1F1B, stage 0 of 2: F0 out; F1 out, B0 in; F2 out, B1 in; B2 in.
    assert steps([400], 3, schedule="1f1b") == [Cost(4, 3, 4000)] * 2
    # Nothing goes back where nothing is trained.
    frozen = [Cost(2, 2, 4000), Cost(2 + 3, 2, 800), Cost(4, 2, 800)]
    assert steps([400, 80], 2, 1, "gpipe") == frozen
