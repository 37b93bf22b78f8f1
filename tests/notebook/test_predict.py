import pytest

from workbook.notebook.prediction import predict_row


def test_row_holds_prediction_model_measurement_and_ratios():
    row = predict_row("time", "s", 0.004, 0.0025, [0.006, 0.005, 0.009])
    assert row.measured == 0.006
    assert row.ratio == pytest.approx(1.5)
    assert row.model_ratio == pytest.approx(2.4)
    measured = "6 ms (median of 3, 5 ms to 9 ms)"
    assert tuple(row.cells().values()) == ("time", "4 ms", "2.5 ms", measured, "1.5 ×", "2.4 ×")


def test_text_reads_as_a_sentence():
    row = predict_row("bytes sent", "bytes", 2048, 1024, 1024)
    assert repr(row) == (
        "bytes sent: prediction 2 KiB, model 1 KiB, measured 1 KiB "
        "(0.5 × the prediction, 1 × the model)"
    )


@pytest.mark.parametrize("absent", [None, ...])
def test_no_prediction_is_fine(absent):
    row = predict_row("steps", "steps", absent, None, 6)
    assert row.ratio is None
    assert repr(row) == "steps: no prediction, no model, measured 6 steps"
    assert "no prediction" in row._repr_html_()


def test_a_prediction_of_zero_has_no_ratio():
    row = predict_row("steps", "steps", 0, 6, 6)
    assert row.ratio is None
    assert row.model_ratio == 1


def test_html_is_a_table_with_headers_and_escapes_names():
    html = predict_row("a < b", "s", 1, 1, 1)._repr_html_()
    assert html.count('<th scope="col">') == 6
    assert ">a &lt; b</th>" in html
    assert html.count("<td ") == 5


def test_numbers_with_units_are_refused_with_the_next_step():
    with pytest.raises(ValueError, match="prediction must be a number in s, got '5 ms'"):
        predict_row("time", "s", "5 ms", None, 1)
    with pytest.raises(ValueError, match="model must be a number"):
        predict_row("time", "s", 1, [2], 1)
    with pytest.raises(ValueError, match="list of repeats"):
        predict_row("time", "s", 1, 2, [])
