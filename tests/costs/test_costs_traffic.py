"""What is sent, against the textbook's closed forms.

Real runs send what these costs say (tests/collectives, tests/strategies), by the same schedules:
here the schedules are held to the textbook.
"""

import pytest

from labkit.costs.traffic import (
    Cost,
    halving_doubling_cost,
    model_parallel_cost,
    naive_all_reduce_cost,
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


def test_a_step_of_stages_sends_what_crosses_the_cuts():
    def steps(cuts, *args, **options):
        ranks = range(len(cuts) + 1)
        return [model_parallel_cost(cuts, 10, r, len(ranks), *args, **options) for r in ranks]

    # The stage in the middle sends an activation on, and a gradient back.
    assert steps([400, 80]) == [Cost(2, 1, 4000), Cost(4, 2, 800 + 4000), Cost(2, 1, 800)]
    # A pipeline's activation out and gradient in, at the same neighbor, are one exchange.
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
