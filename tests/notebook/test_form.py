"""The field of a prediction. In a browser: tests/project/test_browser_progress.py."""

import pytest

from workbook.notebook.form import PredictionForm
from workbook.notebook.prediction import Prediction


@pytest.fixture
def made():
    return Prediction("time of <one> step", "s", "time")


@pytest.fixture
def form(made):
    made.form = PredictionForm(made)
    return made.form


def test_what_is_typed_is_the_prediction_and_said_with_its_unit(form, made):
    form.field.value = "1,5 ms"
    assert made.value == 0.0015
    assert "<strong>1.5 ms</strong>" in form.said.value
    assert 'role="status" aria-live="polite"' in form.said.value
    assert form.field.description == "Your prediction of time of <one> step (s)"


def test_a_wrong_unit_is_said_and_the_earlier_entry_stays(form, made):
    form.field.value = "1.5 ms"
    form.field.value = "3 <MiB>"
    assert "&lt;MiB&gt;&#x27; is not a unit here: give it in s" in form.said.value
    assert "Your prediction is still 1.5 ms" in form.said.value
    assert made.value == 0.0015
    form.fix.click()
    assert "is not a unit" in form.said.value


def test_measured_it_is_locked_and_shows_the_measurement(form, made):
    form.field.value = "1.5 ms"
    made.measured([0.003], model=0.002)
    assert form.field.disabled
    assert form.fix.layout.display == "none"
    assert "time of &lt;one&gt; step" in form.said.value
    assert ">3 ms</td>" in form.said.value
    assert "Locked since" in form.said.value
    form.field.value = "3 ms"
    assert made.value == 0.0015


def test_a_locked_one_may_be_made_again_on_purpose(form, made):
    form.field.value = "1.5 ms"
    made.measured(0.003)
    form.again.click()
    assert (form.field.value, form.field.disabled) == ("", False)
    form.field.value = "3 ms"
    assert made.value == 0.003
    made.measured(0.003)
    assert form.field.disabled


def test_it_shows_what_was_locked_before(form, made):
    form.field.value = "1.5 ms"
    made.measured(0.003)
    later = PredictionForm(Prediction("time of <one> step", "s", "time"))
    assert later.field.disabled
    assert later.field.value == "0.0015 s"
    assert ">3 ms</td>" in later.said.value
