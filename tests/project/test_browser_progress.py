"""A prediction and the progress of a learner, in the browser."""

import re

import pytest

pytestmark = pytest.mark.browser

PREDICTS = 'import workbook\n\nsent = workbook.predict("sent by one rank", "bytes")'
MEASURES = 'workbook.predict_row("sent by one rank", "bytes", sent, 6_000_000, 6_000_000)'
CHECKS = """
from workbook import check

def double(x):
    return 2 * x

check.answers(double, {(1,): 2, (3,): 6})
"""


def test_a_prediction_is_locked_and_kept_over_a_restart_of_the_kernel(lab):
    lab.add("predicts.ipynb", PREDICTS, MEASURES, CHECKS, "workbook.progress()")
    page = lab.open("predicts.ipynb")
    page.run_cell(0)
    field = page.cell(0).get_by_label("Your prediction of sent by one rank (bytes)")
    field.fill("3 s")
    field.press("Enter")
    page.wait_for_text("'s' is not a unit here")
    field.fill("5,7 MiB")
    page.cell(1).click()  # to leave the field is enough
    page.wait_for_text("Your prediction: 5.7 MiB")
    page.run_cell(1)
    page.wait_for_text("Locked since it was measured")
    assert field.is_disabled()
    page.run_cell(2)
    page.restart_kernel()
    page.run_cell(0)
    page.wait_for_text("Locked since it was measured")
    assert field.input_value() == "5976883.2 bytes"
    page.run_cell(3)
    page.wait_for_text(" exercises passed")
    (shown,) = [cell["text"] for cell in page.cells() if "within a factor" in cell["text"]]
    assert re.search(r"\b1 of \d\d exercises passed", shown)
    assert "passed: double" in shown
    assert "predicts\tsent by one rank\t5.7 MiB\t5.72 MiB" in shown
    page.press_button("Predict again")
    page.wait_for_text("Type it and press Enter")
    assert field.is_enabled()
    page.close()
