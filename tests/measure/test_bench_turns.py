"""The rules by which the benches time: turns, spreads, ratios; how fast is no test's business."""

from workbook.measure import turns
from workbook.measure.record import Result, Spread


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
    seconds = {4: {"ours": [1.0, 2.0], "gloo": [3.0, 6.0]}}
    made = Result(
        "T", {"P": 2}, seconds, ("gloo",), "size_bytes", {"twice_s": {4: {"ours": 0.002}}}
    )
    ours, gloo = made.rows()
    assert ours["ratio_to"]["gloo"] == {"median": 3.0, "low": 3.0, "high": 3.0}
    assert gloo["ratio_to"]["gloo"]["median"] == 1.0
    assert (ours["P"], ours["size_bytes"], ours["twice_s"]) == (2, 4, 0.002)
    assert "2 ms" in str(made)
    assert Spread.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(3.0, 2.0, 4.0)
