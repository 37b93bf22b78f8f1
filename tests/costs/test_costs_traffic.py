"""What is sent, against the textbook's closed forms."""

import math

import pytest

from labkit.costs.traffic import (
    Cost,
    all_gather_cost,
    all_to_all_cost,
    barrier_cost,
    broadcast_cost,
    gather_cost,
    model_parallel_cost,
    naive_all_reduce_cost,
    parameter_server_cost,
    reduce_cost,
    reduce_scatter_cost,
    ring_all_reduce_cost,
    scatter_cost,
    share_only_cost,
    share_reduce_cost,
    tree_all_reduce_cost,
)

N, ITEM = 12 * 35, 4  # divides by 2 to 7

S = N * ITEM


def over_ranks(cost, world_size, *args, **options):
    return [cost(N, ITEM, world_size, rank, *args, **options) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7])
def test_ring_and_its_halves(world_size):
    each = (world_size - 1) * S // world_size
    half = Cost(world_size - 1, world_size - 1, each)
    assert over_ranks(share_reduce_cost, world_size) == [half] * world_size
    assert over_ranks(share_only_cost, world_size) == [half] * world_size
    assert over_ranks(ring_all_reduce_cost, world_size) == [half + half] * world_size
    whole = Cost(world_size - 1, world_size - 1, (world_size - 1) * S)
    for cost in (all_gather_cost, reduce_scatter_cost, all_to_all_cost):
        assert over_ranks(cost, world_size) == [whole] * world_size


def test_the_ring_sends_every_byte_even_where_chunks_differ():
    for num_elements in (0, 1, 3, 10):
        costs = [ring_all_reduce_cost(num_elements, 8, 4, rank) for rank in range(4)]
        assert sum(cost.num_bytes for cost in costs) == 2 * 3 * num_elements * 8
        assert {cost.messages for cost in costs} == {6}


@pytest.mark.parametrize("doublings", [0, 1, 2, 3, 4])
def test_tree_of_a_power_of_two(doublings):
    each = Cost(doublings, doublings, doublings * S)
    assert over_ranks(tree_all_reduce_cost, 2**doublings) == [each] * 2**doublings


def test_tree_with_a_fold():
    assert over_ranks(tree_all_reduce_cost, 6) == [
        *[Cost(4, 3, 3 * S)] * 2,  # receives at first, twice in pairs, sends the result
        *[Cost(2, 2, 2 * S)] * 2,
        *[Cost(2, 1, S)] * 2,  # hands over, gets the result
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_rooted_ones(world_size):
    rounds = math.ceil(math.log2(world_size))
    for root in {0, world_size - 1}:
        broadcast = over_ranks(broadcast_cost, world_size, root)
        reduce = over_ranks(reduce_cost, world_size, root)
        assert broadcast[root] == Cost(rounds, rounds, rounds * S)
        assert reduce[root] == Cost(rounds, 0, 0)
        for rank in range(world_size):
            assert broadcast[rank].steps == reduce[rank].steps
            if rank != root:
                assert (reduce[rank].messages, reduce[rank].num_bytes) == (1, S)
        assert sum(cost.num_bytes for cost in broadcast) == (world_size - 1) * S
        gather = over_ranks(gather_cost, world_size, root)
        scatter = over_ranks(scatter_cost, world_size, root)
        assert gather[root] == Cost(world_size - 1, 0, 0)
        assert scatter[root] == Cost(world_size - 1, world_size - 1, (world_size - 1) * S)
        for rank in set(range(world_size)) - {root}:
            assert (gather[rank], scatter[rank]) == (Cost(1, 1, S), Cost(1, 0, 0))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_naive_and_barrier(world_size):
    naive = over_ranks(naive_all_reduce_cost, world_size)
    others = world_size - 1
    assert naive == [Cost(2 * others, others, others * S)] + [Cost(2, 1, S)] * others
    rounds = math.ceil(math.log2(world_size))
    assert {barrier_cost(world_size, r) for r in range(world_size)} == {Cost(*[rounds] * 3)}


def test_partial_sums_of_sixteen_bit_floats_are_twice_as_long():
    args = N, 2, 4
    ring = ring_all_reduce_cost(*args, partial_bytes=4)
    assert ring.num_bytes == 3 * (4 + 2) * N // 4
    assert tree_all_reduce_cost(*args, partial_bytes=4) == tree_all_reduce_cost(N, 4, 4)
    # With three ranks rank 0 also returns the finished result, which is short again.
    assert tree_all_reduce_cost(N, 2, 3, 0, partial_bytes=4).num_bytes == (4 + 2) * N


def test_a_parameter_server_moves_all_workers_bytes():
    assert over_ranks(parameter_server_cost, 4) == [Cost(6, 3, 3 * S)] + [Cost(2, 1, S)] * 3
    two = over_ranks(parameter_server_cost, 6, servers=2)
    assert two == [Cost(8, 4, 2 * S)] * 2 + [Cost(4, 2, S)] * 4
    assert over_ranks(parameter_server_cost, 1) == [Cost(0, 0, 0)]
    # 10 elements on 3 servers: slices of 4, 3 and 3.
    uneven = [parameter_server_cost(10, 8, 5, rank, servers=3).num_bytes for rank in range(5)]
    assert uneven == [2 * 4 * 8, 2 * 3 * 8, 2 * 3 * 8, 80, 80]


def test_a_step_of_stages_sends_what_crosses_the_cuts():
    cuts, batch = [400, 80], 10
    # Stage 0 sends an activation and receives its gradient; the stage in the middle does so on
    # both sides.
    assert [model_parallel_cost(cuts, batch, rank, 3) for rank in range(3)] == [
        Cost(2, 1, 4000),
        Cost(4, 2, 800 + 4000),
        Cost(2, 1, 800),
    ]
    # A pipeline's activation out and gradient in, at the same neighbour, are one exchange.
    merged = [model_parallel_cost(cuts, batch, rank, 3, schedule="gpipe") for rank in range(3)]
    assert [cost.steps for cost in merged] == [1, 3, 2]
    # Three micro-batches, of 4, 3 and 3 samples. GPipe, stage 1 of 3: F0 in, F0 out, F1 in, F1
    # out, F2 in, F2 out and B0 in at once; then B0 out, B1 in, B1 out, B2 in, B2 out.
    filled = [model_parallel_cost(cuts, batch, rank, 3, 3, schedule="gpipe") for rank in range(3)]
    assert filled == [
        Cost(5, 3, 4000),
        Cost(11, 6, 4800),
        Cost(6, 3, 800),
    ]
    # 1F1B, stage 0 of 2: F0 out; F1 out, B0 in; F2 out, B1 in; B2 in. Stage 1: F0 in; B0 out, F1
    # in; B1 out, F2 in; B2 out.
    eager = [model_parallel_cost([400], batch, r, 2, 3, schedule="1f1b") for r in range(2)]
    assert eager == [Cost(4, 3, 4000), Cost(4, 3, 4000)]
    assert model_parallel_cost([], batch, 0, 1) == Cost(0, 0, 0)
    # Two samples make two micro-batches at most.
    assert model_parallel_cost([400], 2, 1, 2, 8, schedule="gpipe").messages == 2


def test_no_gradient_goes_where_nothing_is_trained():
    costs = [model_parallel_cost([400, 80], 10, rank, 3, 2, 1, "gpipe") for rank in range(3)]
    assert costs == [Cost(2, 2, 4000), Cost(2 + 3, 2, 800), Cost(4, 2, 800)]
    inference = [model_parallel_cost([400, 80], 10, rank, 3, first_trained=3) for rank in range(3)]
    assert inference == [Cost(1, 1, 4000), Cost(2, 1, 800), Cost(1, 0, 0)]


def test_stages_without_a_cut_between_them_are_named():
    with pytest.raises(ValueError, match="rank 0 and bytes for 1 cut of 3 stages: give 2"):
        model_parallel_cost([400], 10, 0, 3)
    with pytest.raises(ValueError, match=r"rank 2 .* a rank from 0 to 1"):
        model_parallel_cost([400], 10, 2, 2)
