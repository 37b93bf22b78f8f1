"""The rules by which the benches time: turns, spreads, ratios; how fast is no test's business."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from workbook.measure import spread, turns


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


def test_a_table_is_aligned_and_an_empty_row_is_an_empty_line():
    lines = spread.table(["size", "x"], [["1 KiB", "2"], [], ["", "33"]]).splitlines()
    assert lines == ["size   x", "1 KiB  2", "", "       33"]


@pytest.mark.parametrize("fails", ["the second group", "a step", "nothing"])
def test_process_groups_end_whatever_is_raised(fails, monkeypatch):
    made, ended = [], []

    def new_group(backend):
        if fails == "the second group" and made:
            raise RuntimeError(fails)
        made.append(backend)
        return SimpleNamespace(shutdown=lambda: ended.append(backend))

    monkeypatch.setattr(turns.dist, "new_group", new_group)
    comm = SimpleNamespace(device=torch.device("cpu"), world_size=2)
    expected = contextlib.nullcontext()
    if fails != "nothing":
        expected = pytest.raises(RuntimeError, match=fails)
    with expected, turns.process_groups(comm) as groups:
        assert list(groups) == ["gloo", "labkit"]
        assert not ended
        if fails == "a step":
            raise RuntimeError(fails)
    assert ended == made
    assert len(made) == (1 if fails == "the second group" else 2)
