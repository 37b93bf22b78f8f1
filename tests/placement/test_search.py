"""The cheapest cuts against all cuts there are."""

import itertools
import math
import operator
import random

import pytest

from labkit.placement.search import cheapest_cuts, cheapest_rest, search_cuts
from labkit.schedules.split_points import stage_bounds


def stage_costs(points, cost, num_layers):
    return [cost(stage, *bound) for stage, bound in enumerate(stage_bounds(points, num_layers))]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("combine", "whole"), [(operator.add, sum), (max, max)])
def test_the_dynamic_program_finds_the_cheapest_cuts_and_the_earliest_of_them(
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


def test_the_search_finds_the_best_split_and_skips_most_others():
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
