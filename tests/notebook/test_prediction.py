"""A prediction is open until it is measured, then locked, also after a restart."""

import json

import numpy as np
import pytest

import workbook
from workbook.notebook import record
from workbook.notebook.form import PredictionForm

SENT = ("sent by one rank", "bytes")


def recorded():
    return record.read().predictions.get("", {}).get(SENT[0], [])


def restart(monkeypatch):
    """What a new kernel knows: the file alone."""
    monkeypatch.setattr(record, "_pending", {})


def test_it_is_locked_by_its_first_measurement_also_after_a_restart(monkeypatch):
    made = workbook.predict(*SENT)
    made.enter("1 MiB")
    made.enter("2 MiB")
    assert made.locked_at is None
    row = workbook.predict_row(*SENT, made, np.float32(2**20), [np.float32(2**20)])
    assert (row.prediction, row.model, row.measured) == (2**21, 2**20, 2**20)
    with pytest.raises(ValueError, match="2 MiB, locked since"):
        made.enter("1 MiB")
    restart(monkeypatch)
    again = workbook.predict(*SENT, value="1 MiB")
    assert (again.value, again.locked_at) == (2**21, made.locked_at)
    assert workbook.predict_row(*SENT, again, None, 2**19).prediction == 2**21
    (one,) = recorded()
    assert (one.value, one.measured, one.measured_at) == (2**21, 2**19, made.locked_at)


def test_predicted_again_both_are_recorded(monkeypatch):
    made = workbook.predict(*SENT, value=1)
    made.measured(4)
    made.again()
    made.enter("2")
    made.enter("3 bytes")
    assert [one.value for one in recorded()] == [1, 3]
    made.measured(4)
    assert [(one.value, one.measured) for one in recorded()] == [(1, 4), (3, 4)]
    restart(monkeypatch)
    assert workbook.predict(*SENT).value == 3


def test_an_open_one_is_continued_after_a_restart_and_can_be_taken_back(monkeypatch):
    workbook.predict(*SENT).enter("1 MiB")
    restart(monkeypatch)
    made = workbook.predict(*SENT)
    assert (made.value, made.locked_at) == (2**20, None)
    made.enter("")
    assert recorded() == []


def test_none_at_all_is_fine(capsys):
    made = workbook.predict(*SENT)
    assert capsys.readouterr().out == "Your prediction of sent by one rank: none yet (bytes)\n"
    row = workbook.predict_row(*SENT, made, None, 6)
    assert repr(row) == "sent by one rank: no prediction, no formula, measured 6 B"
    assert made.locked_at
    assert recorded() == []


def test_what_an_earlier_version_has_recorded_still_counts(monkeypatch):
    at = "2026-01-01T00:00:00+00:00"
    one = {"quantity": SENT[0], "unit": "bytes", "value": 6.0, "predicted_at": at}
    one |= {"measured": 12.0, "model": None, "measured_at": at}
    whole = {"version": 1, "exercises": {}, "predictions": {"": {SENT[0]: [one]}}}
    path, _ = record.progress_file()
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(whole))
    made = workbook.predict(*SENT)
    assert (made.value, made.locked_at) == (6, at)
    assert workbook.progress().rows() == [["", SENT[0], "6 B", "12 B", "2"]]
    workbook.predict("sent by one rank", "messages", value=3).measured(3)
    assert [one.unit for one in recorded()] == ["bytes", "messages"]


def test_two_of_one_quantity_have_names():
    workbook.predict("ratio", "times", id="fast").measured(1)
    workbook.predict("ratio", "times", value=2, id="slow").measured(1)
    assert workbook.predict("ratio", "times", id="fast").value is None
    assert workbook.predict("ratio", "times", id="slow").value == 2


@pytest.mark.parametrize("value", ["3 s", "many", float("nan"), float("inf")])
def test_a_value_that_is_no_number_of_bytes_is_refused(value):
    with pytest.raises(ValueError, match=r"number|unit"):
        workbook.predict(*SENT, value=value)
    assert recorded() == []


def test_a_measurement_without_repeats_or_in_another_unit_locks_nothing():
    made = workbook.predict(*SENT, value=5)
    with pytest.raises(ValueError, match="list of repeats"):
        workbook.predict_row(*SENT, made, None, [])
    with pytest.raises(ValueError, match="prediction is in bytes"):
        workbook.predict_row(SENT[0], "s", made, None, [1])
    assert made.locked_at is None


def test_a_row_has_prediction_model_measurement_and_ratios():
    row = workbook.predict_row("a < b", "s", 0.004, 0.0025, [0.006, 0.005, 0.009])
    measured = "6 ms (median of 3, from 5 ms to 9 ms)"
    assert tuple(row.cells().values()) == ("a < b", "4 ms", "2.5 ms", measured, "1.5", "2.4")
    assert repr(row) == (
        f"a < b: prediction 4 ms, formula 2.5 ms, measured {measured} "
        "(1.5 × the prediction, 2.4 × the formula)"
    )
    page = row._repr_html_()
    assert page.count('<th scope="col">') == 6
    assert ">a &lt; b</th>" in page
    assert "–" in workbook.predict_row("steps", "steps", 0, 6, 6).cells().values()


def test_its_field():
    made = workbook.predict("time of <one> step", "s")
    form = made.form = PredictionForm(made)
    assert form.field.description == "Your prediction of time of <one> step (s)"
    form.field.value = "1.5 ms"
    form.field.value = "3 <MiB>"
    assert "&lt;mib&gt;&#x27; is not a unit here: give it in s" in form.status.value
    assert "Your prediction: 1.5 ms" in form.status.value
    assert 'role="status" aria-live="polite"' in form.status.value
    workbook.predict_row("time of <one> step", "s", made, 0.002, [0.003])
    assert form.field.layout.display == "none"
    assert "time of &lt;one&gt; step: 1.5 ms, locked since" in form.status.value
    form.again.click()
    assert (form.field.value, form.field.layout.display) == ("", None)
    form.field.value = "3 ms"
    assert made.value == 0.003
    made.measured(0.003)
    assert form.field.layout.display == "none"
