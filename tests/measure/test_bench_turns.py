"""The rules by which the benches time: turns, spreads, ratios; how fast is no test's business."""

from labkit.costs.link import Link
from workbook.measure import turns
from workbook.measure.bench import Result
from workbook.measure.record import Spread


def test_each_repeat_begins_with_another_contender():
    called = []
    contenders = {name: lambda name=name: called.append(name) or 1.0 for name in "abc"}
    assert turns.repeat_turns(contenders, 4) == {name: [1.0] * 4 for name in "abc"}
    assert "".join(called) == "abc" + "bca" + "cab" + "abc"


def test_a_turn_lasts_until_the_last_rank_has_ended():
    by_rank = [{8: {"a": [1.0, 5.0]}}, {8: {"a": [2.0, 3.0]}}, {8: {"a": [0.0, 4.0]}}]
    assert turns.slowest(by_rank) == {8: {"a": [2.0, 5.0]}}


def test_ratios_are_of_pairs_so_drift_drops_out():
    """The machine is twice as slow in the second repeat: the ratio is not."""
    seconds = {4: {"ring": [1.0, 2.0], "gloo": [3.0, 6.0]}}
    made = Result(2, seconds, Link(1e-3, 0.0, 0.0))
    ours, gloo = made.rows()
    assert ours["ratio_to"]["gloo"] == {"median": 3.0, "low": 3.0, "high": 3.0}
    assert gloo["ratio_to"]["gloo"]["median"] == 1.0
    assert (ours["world_size"], ours["size_bytes"]) == (2, 4)
    assert "1.5 s" in str(made)
    assert Spread.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(3.0, 2.0, 4.0)
