"""Split points: which are possible, and the stages that they make."""

import itertools

import pytest

from labkit.schedules.split_points import check_split_points, stage_bounds, stage_ends


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
        ([1], 1, None, "with 1 layer there is nothing to cut"),
        ([5, 2], 7, None, "5, 2 are out of order: give each once"),
        ([2, 2], 7, None, "2, 2 are out of order"),
        ([2.0], 7, None, "split point 2.0 is not an integer"),
        ([2, 5], 7, 4, r"2 split points \(2, 5\) for 4 stages: give 3"),
        ([], 7, 2, r"0 split points \(none\) for 2 stages: give 1"),
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
