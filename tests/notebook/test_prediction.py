"""A prediction is open until it is measured, then locked, also after a restart."""

import re

import pytest

import workbook
from workbook.notebook import record

SENT = ("sent by one rank", "bytes")


def recorded():
    return record.predictions("", SENT[0])


def restart(monkeypatch):
    """What a new kernel knows: the file alone."""
    monkeypatch.setattr(record, "_pending", {})


def test_it_is_locked_by_its_first_measurement(monkeypatch):
    made = workbook.predict(*SENT)
    made.enter("1 MiB")
    made.enter("2 MiB")
    assert made.locked_at is None
    row = workbook.predict_row(*SENT, made, 2**20, [2**20])
    assert (row.prediction, row.model, row.measured) == (2**21, 2**20, 2**20)
    with pytest.raises(ValueError, match="2 MiB, locked since"):
        made.enter("1 MiB")
    restart(monkeypatch)
    (one,) = recorded()
    assert (one.value, one.measured, one.model) == (2**21, 2**20, 2**20)


def test_the_cell_run_again_keeps_the_locked_one_even_after_a_restart(monkeypatch, capsys):
    workbook.predict(*SENT, value="2 MiB").measured(2**20)
    restart(monkeypatch)
    capsys.readouterr()
    again = workbook.predict(*SENT, value="1 MiB")
    said = capsys.readouterr().out
    assert re.match(
        r"Your prediction of sent by one rank: 2 MiB, locked since it was measured, \d{4}-", said
    )
    assert again.value == 2**21
    assert again.row.measured == 2**20
    assert workbook.predict_row(*SENT, again, None, 2**19).prediction == 2**21


def test_predicted_again_both_are_recorded():
    made = workbook.predict(*SENT, value=1)
    made.measured(4)
    made.again("2")
    made.enter("3 bytes")
    assert [one.value for one in recorded()] == [1, 3]
    made.measured(4)
    assert [(one.value, one.measured) for one in recorded()] == [(1, 4), (3, 4)]


def test_an_open_one_is_continued_after_a_restart(monkeypatch):
    workbook.predict(*SENT).enter("1 MiB")
    restart(monkeypatch)
    made = workbook.predict(*SENT)
    assert (made.value, made.locked_at) == (2**20, None)
    made.enter("")
    assert recorded() == []


def test_none_at_all_is_fine():
    made = workbook.predict(*SENT)
    row = workbook.predict_row(*SENT, made, None, 6)
    assert repr(row) == "sent by one rank: no prediction, no model, measured 6 B"
    assert made.locked_at
    assert recorded() == []
    assert workbook.predict(*SENT).locked_at is None


@pytest.mark.parametrize("value", [None, ...])
def test_without_a_browser_it_prints_one_line(value, capsys):
    workbook.predict(*SENT, value=value)
    assert capsys.readouterr().out == "Your prediction of sent by one rank: none yet, in bytes\n"
    workbook.predict("time", "s", value=3e-3)
    assert capsys.readouterr().out == "Your prediction of time: 3 ms\n"


def test_two_of_one_quantity_have_names():
    workbook.predict("ratio", "times", id="fast").measured(1)
    workbook.predict("ratio", "times", value=2, id="slow").measured(1)
    assert workbook.predict("ratio", "times", id="fast").value is None
    assert workbook.predict("ratio", "times", id="slow").value == 2


def test_a_row_in_another_unit_of_the_same_kind():
    made = workbook.predict("time", "s", value="4 ms")
    row = workbook.predict_row("time", "ms", made, 1, [5])
    assert (row.prediction, row.measured) == (pytest.approx(4), 5)
    (one,) = record.predictions("", "time")
    assert (one.measured, one.model) == (pytest.approx(0.005), pytest.approx(0.001))
    with pytest.raises(ValueError, match="is not a unit here"):
        workbook.predict_row("time", "bytes", made, None, 5)


def test_a_page_whose_unit_has_changed():
    workbook.predict("time", "ms", value=4).measured(5)
    assert workbook.predict("time", "s").value == pytest.approx(0.004)
    workbook.predict("time", "s").measured(0.006)
    assert record.predictions("", "time")[-1].measured == pytest.approx(6)
    assert workbook.predict("time", "messages").value is None


def test_a_plain_number_is_recorded_and_the_first_one_stays():
    row = workbook.predict_row(*SENT, 100, None, 200)
    assert row.note == ""
    row = workbook.predict_row(*SENT, 200, None, 200)
    assert row.prediction == 200
    assert row.note == "Recorded is what you predicted at first: 100 B."
    assert row.note in row._repr_html_()
    assert [(one.value, one.measured) for one in recorded()] == [(100, 200)]


@pytest.mark.parametrize("value", ["3 s", "many", float("nan"), float("inf"), [1]])
def test_a_value_that_is_no_number_of_bytes_is_refused(value):
    with pytest.raises(ValueError, match=r"number|unit"):
        workbook.predict(*SENT, value=value)
    assert recorded() == []


def test_what_is_not_finite_is_shown_and_not_recorded():
    assert workbook.predict_row(*SENT, float("inf"), None, 5).prediction == float("inf")
    workbook.predict_row(*SENT, 5, float("inf"), float("nan"))
    (one,) = recorded()
    assert (one.model, one.measured) == (None, None)
    workbook.predict("time", "ms", value=1e308)
    workbook.predict_row("time", "s", 1e308, None, 1e308)
    workbook.predict_row(*SENT, 5, float("inf"), 6)
    (one,) = recorded()
    assert (one.model, one.measured) == (None, 6)


def test_a_measurement_without_repeats_locks_nothing():
    made = workbook.predict(*SENT, value=5)
    with pytest.raises(ValueError, match="list of repeats"):
        workbook.predict_row(*SENT, made, None, [])
    assert made.locked_at is None


def test_a_cell_that_ends_with_it_shows_it_once(capsys):
    made = workbook.predict(*SENT)
    made._ipython_display_()
    assert capsys.readouterr().out.count("Your prediction") == 1
    made._ipython_display_()
    assert capsys.readouterr().out.count("Your prediction") == 1


def test_a_question_is_asked_as_it_is(capsys):
    workbook.predict("How many bytes does one rank send?", "bytes")
    assert capsys.readouterr().out == "How many bytes does one rank send? none yet, in bytes\n"
