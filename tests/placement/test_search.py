"""Split points that are none are named; the cheapest cuts against all cuts there are."""

import itertools
import math
import operator
import random

import pytest

from labkit.placement.search import cheapest_cuts, cheapest_rest, search_cuts
from labkit.schedules.stages import check_split_points, stage_bounds, stage_ends


def test_split_points_begin_stages():
    assert check_split_points([2, 5], 7, num_stages=3) == (2, 5)
    assert stage_bounds([2, 5], 7) == [(0, 2), (2, 5), (5, 7)]
    assert stage_bounds((), 7) == [(0, 7)]
    assert check_split_points((), 1, num_stages=1) == ()
    assert check_split_points(range(1, 4), 4) == (1, 2, 3)


@pytest.mark.parametrize(
    ("points", "num_layers", "num_stages", "words"),
    [
        ([0], 7, None, "split point 0 leaves a stage without layers: with 7 layers it is 1 to 6"),
        ([2, 7], 7, None, "split point 7 .* 1 to 6"),
        ([-1], 7, None, "split point -1"),
        ([1], 1, None, "with 1 layer there is nothing to cut"),
        ([5, 2], 7, None, "5, 2 are out of order: 2 follows 5"),
        ([2, 2], 7, None, "2 comes twice in 2, 2"),
        ([2.0], 7, None, "split point 2.0 is not an integer"),
        ([True], 7, None, "split point True is not an integer"),
        (["2"], 7, None, "split point '2' is not an integer"),
        ([2, 5], 7, 4, r"2 split points \(2, 5\) for 4 stages: give 3"),
        ([], 7, 2, r"0 split points \(none\) for 2 stages: give 1"),
        ([3], 7, 1, r"1 split point \(3\) for 1 stage: give 0"),
        (5, 7, None, r"one for each cut, got 5: write \(5,\)"),
        ("2, 5", 7, None, r"got '2, 5': write \(2, 5,\)"),
    ],
)
def test_what_is_no_split_is_named(points, num_layers, num_stages, words):
    with pytest.raises(ValueError, match=words):
        check_split_points(points, num_layers, num_stages)


def test_a_stage_ends_where_every_later_one_still_gets_a_layer():
    assert list(stage_ends(0, 0, 6, 3)) == [1, 2, 3, 4]
    assert list(stage_ends(1, 3, 6, 3)) == [4, 5]
    assert list(stage_ends(2, 4, 6, 3)) == [6]
    reached = {
        (first, second)
        for first in stage_ends(0, 0, 6, 3)
        for second in stage_ends(1, first, 6, 3)
    }
    assert reached == set(itertools.combinations(range(1, 6), 2))


def stage_costs(points, cost, num_layers):
    return [cost(stage, *bound) for stage, bound in enumerate(stage_bounds(points, num_layers))]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("combine", "whole"), [(operator.add, sum), (max, max)])
def test_the_dynamic_programme_finds_the_cheapest_and_the_earliest_of_them(
    num_stages, combine, whole
):
    draw = random.Random(num_stages)
    for num_layers in (7, 8, 9):
        # Few different costs, so that several splits are equally good; some are not allowed.
        costs = {}

        def cost(stage, start, end, costs=costs):
            return costs.setdefault((stage, start, end), draw.choice([0, 1, 2, 3, math.inf]))

        rest = cheapest_rest(cost, num_layers, num_stages, combine)
        splits = itertools.combinations(range(1, num_layers), num_stages - 1)
        best = min((whole(stage_costs(split, cost, num_layers)), split) for split in splits)
        assert rest[0][0] == best[0]
        if best[0] < math.inf:
            assert cheapest_cuts(cost, rest, combine) == best[1]


def test_the_search_finds_the_best_whole_and_leaves_most_splits_out():
    draw = random.Random(7)
    layers = [draw.randrange(1, 20) for _ in range(16)]
    looked_at = []

    def cost(stage, start, end):
        return math.inf if stage == 1 and start == 5 else sum(layers[start:end])

    def through(stage, start, end):
        return cost(stage, start, end) / 8

    def total(points):
        looked_at.append(points)
        costs = stage_costs(points, cost, len(layers))
        return max(sum(costs[:stage]) / 8 + own for stage, own in enumerate(costs)) + costs[0] / 4

    splits = list(itertools.combinations(range(1, 16), 3))
    best = min((total(split), split) for split in splits)
    looked_at.clear()
    assert search_cuts(cost, through, total, 16, 4) == best[1]
    assert len(looked_at) < len(splits) / 2
    assert len(set(looked_at)) == len(looked_at)


def test_of_equal_splits_the_search_takes_the_earliest():
    assert search_cuts(lambda *_: 0.0, lambda *_: 0.0, lambda _: 1.0, 6, 3) == (1, 2)
