"""The rules by which the benches time: turns, spreads, ratios; how fast is no test's business."""

import json

from workbook.measure import spread, turns
from workbook.measure.record import Result, command_line, dumped


def test_each_repeat_begins_with_another_contender(monkeypatch):
    monkeypatch.setattr(turns, "agree", lambda comm, number: number)
    called = []
    contenders = {name: lambda name=name: called.append(name) or 1.0 for name in "abc"}
    seconds = turns.take_turns(None, contenders, 4, budget_s=60)
    assert "".join(called) == "abc" + "abc" + "abc" + "bca" + "cab" + "abc"
    assert seconds == {name: [1.0] * 4 for name in "abc"}


def test_what_takes_long_gets_fewer_repeats_but_never_too_few(monkeypatch):
    monkeypatch.setattr(turns, "agree", lambda comm, number: number)
    seconds = turns.take_turns(None, {"a": lambda: 1.0}, 100, budget_s=0)
    assert len(seconds["a"]) == turns.FEWEST_REPEATS


def test_a_turn_lasts_until_the_last_rank_has_ended():
    by_rank = [{8: {"a": [1.0, 5.0]}}, {8: {"a": [2.0, 3.0]}}, {8: {"a": [0.0, 4.0]}}]
    assert turns.slowest(by_rank) == {8: {"a": [2.0, 5.0]}}


def test_a_spread_is_the_median_and_the_quartiles():
    found = spread.Spread.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
    assert found.text(str) == "3.0 (2.0 to 4.0)"
    assert spread.Spread.of([7.0]).text(str) == "7.0 (7.0 to 7.0)"


def test_ratios_are_of_pairs_so_drift_drops_out():
    """The machine is twice as slow in the second repeat: the ratio is not."""
    seconds = {4: {"ours": [1.0, 2.0], "gloo": [3.0, 6.0]}}
    made = Result("T", {"P": 2}, seconds, ("gloo",), "size_bytes", {"twice_s": lambda *_: 0.002})
    ours, gloo = made.rows()
    assert ours["ratio_to"]["gloo"] == {"median": 3.0, "low": 3.0, "high": 3.0}
    assert gloo["ratio_to"]["gloo"]["median"] == 1.0
    assert (ours["P"], ours["size_bytes"], ours["twice_s"]) == (2, 4, 0.002)
    assert "ours" in str(made)
    assert "2 ms" in str(made)


def test_a_row_of_the_record_is_a_line():
    record = {"config": {"a": [2]}, "rows": [{"a": [1e-05, None]}, {"b": {"c": -3}}], "none": []}
    text = dumped(record)
    assert json.loads(text) == record
    assert '    {"a": [1e-05, null]},\n    {"b": {"c": -3}}\n' in text


def test_the_recorded_command_leaves_out_where_it_wrote():
    words = ["bench", "ddp", "--json", "a.json", "--models", "mlp", "--figure=a.png"]
    assert command_line(words) == "labkit bench ddp --models mlp"
