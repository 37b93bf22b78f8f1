"""The formulas against the textbook's closed forms; the model against what it was made from."""

import math
import random

import pytest

from labkit.costs.link import Link, fit_link
from labkit.costs.seconds import all_reduce_seconds, crossover_bytes, parameter_server_seconds
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
SIZES = [2**k for k in range(10, 27)]


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


def test_the_ring_sends_every_byte_also_where_chunks_differ():
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
    assert share_reduce_cost(*args, partial_bytes=4) == share_reduce_cost(N, 4, 4)
    ring = ring_all_reduce_cost(*args, partial_bytes=4)
    assert ring.num_bytes == 3 * (4 + 2) * N // 4
    assert tree_all_reduce_cost(*args, partial_bytes=4) == tree_all_reduce_cost(N, 4, 4)
    # With three ranks rank 0 also returns the finished result, which is short again.
    assert tree_all_reduce_cost(N, 2, 3, 0, partial_bytes=4).num_bytes == (4 + 2) * N
    assert reduce_cost(*args, rank=1, partial_bytes=4).num_bytes == 4 * N
    assert reduce_scatter_cost(*args, partial_bytes=4).num_bytes == 3 * 4 * N


@pytest.mark.parametrize(("alpha_s", "beta"), [(50e-6, 3e-10), (1e-6, 2e-11), (0.5, 1e-6)])
def test_a_fit_finds_the_line_it_was_made_from(alpha_s, beta):
    link = fit_link(SIZES, [alpha_s + beta * size for size in SIZES])
    assert link.alpha_s == pytest.approx(alpha_s, rel=1e-6)
    assert link.beta_s_per_byte == pytest.approx(beta, rel=1e-6)


def test_a_fit_with_noise_finds_both_ends():
    draw = random.Random(0)
    sizes = SIZES * 5
    seconds = [(50e-6 + 3e-10 * size) * draw.uniform(0.8, 1.2) for size in sizes]
    seconds[3] *= 30  # another program came in between
    link = fit_link(sizes, seconds)
    assert link.alpha_s == pytest.approx(50e-6, rel=0.15)
    assert link.beta_s_per_byte == pytest.approx(3e-10, rel=0.15)


def test_a_fit_is_never_negative():
    down = fit_link([1e3, 1e6], [2e-3, 1e-3])
    assert down.beta_s_per_byte == 0
    assert 1e-3 <= down.alpha_s <= 2e-3
    below_zero = fit_link([1e3, 1e6, 2e6], [1e-6, 3e-3, 9e-3])
    assert below_zero.alpha_s == 0
    assert below_zero.beta_s_per_byte > 0
    assert fit_link([0, 100], [1e-6, 2e-6], gamma_s_per_byte=1e-9).gamma_s_per_byte == 1e-9


@pytest.mark.parametrize(
    ("sizes", "seconds", "words"),
    [
        ([1, 2], [1.0], "2 sizes and 1 times"),
        ([8, 8], [1.0, 2.0], r"two different sizes, got \[8\]"),
        ([], [], "two different sizes"),
        ([1, 2], [1.0, 0.0], "2 bytes in 0.0 s is not a measurement"),
        ([1, 2], [1.0, math.nan], "not a measurement"),
        ([-1, 2], [1.0, 1.0], "-1 bytes"),
    ],
)
def test_what_cannot_be_fitted_is_named(sizes, seconds, words):
    with pytest.raises(ValueError, match=words):
        fit_link(sizes, seconds)


def test_a_link_has_no_negative_cost():
    with pytest.raises(ValueError, match="alpha_s is -1"):
        Link(-1, 0)
    with pytest.raises(ValueError, match="beta_s_per_byte is inf"):
        Link(0, math.inf)
    assert Link(2.0, 0.5).message_seconds(4) == 4.0


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


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("algorithm", ["tree", "ring"])
def test_seconds_count_what_a_rank_pays(algorithm, world_size):
    """Where all ranks pay the same, the model is alpha x messages + beta x bytes."""
    cost = {"tree": tree_all_reduce_cost, "ring": ring_all_reduce_cost}[algorithm]
    each = cost(1600, 4, world_size)
    link = Link(1e-5, 1e-9)
    predicted_s = all_reduce_seconds(algorithm, 6400, world_size, link)
    assert predicted_s == pytest.approx(1e-5 * each.messages + 1e-9 * each.num_bytes)


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


def test_what_cannot_be_predicted_is_named():
    link = Link(1e-5, 1e-9)
    with pytest.raises(ValueError, match="'star': choose one of naive, tree, ring"):
        all_reduce_seconds("star", 1, 2, link)
    with pytest.raises(ValueError, match="-1 bytes"):
        all_reduce_seconds("ring", -1, 2, link)
    for world_size in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="give 1 or more"):
            crossover_bytes(world_size, link)


def test_a_parameter_server_moves_all_workers_bytes():
    assert over_ranks(parameter_server_cost, 4) == [Cost(6, 3, 3 * S)] + [Cost(2, 1, S)] * 3
    two = over_ranks(parameter_server_cost, 6, servers=2)
    assert two == [Cost(8, 4, 2 * S)] * 2 + [Cost(4, 2, S)] * 4
    assert over_ranks(parameter_server_cost, 1) == [Cost(0, 0, 0)]
    # 10 elements on 3 servers: slices of 4, 3 and 3.
    uneven = [parameter_server_cost(10, 8, 5, rank, servers=3).num_bytes for rank in range(5)]
    assert uneven == [2 * 4 * 8, 2 * 3 * 8, 2 * 3 * 8, 80, 80]


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


def test_a_parameter_server_of_nobody_is_refused():
    with pytest.raises(ValueError, match="0 workers, 1 server: give"):
        parameter_server_seconds(S, 0, 1, Link(0, 0))
    with pytest.raises(ValueError, match="-4 bytes"):
        parameter_server_seconds(-4, 1, 1, Link(0, 0))


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
    with pytest.raises(ValueError, match="bytes for 1 cut of 3 stages: give 2"):
        model_parallel_cost([400], 10, 0, 3)
    with pytest.raises(ValueError, match="no rank 2: with 2 stages the ranks are 0 to 1"):
        model_parallel_cost([400], 10, 2, 2)
    with pytest.raises(ValueError, match="'zb': choose one of gpipe, 1f1b"):
        model_parallel_cost([400], 10, 0, 2, schedule="zb")
    with pytest.raises(ValueError, match="micro_batches must be an integer from 1 up, got 0"):
        model_parallel_cost([400], 10, 0, 2, 0, schedule="gpipe")
    with pytest.raises(ValueError, match="3 micro-batches need a schedule: choose one of gpipe"):
        model_parallel_cost([400], 10, 0, 2, 3)
