"""What is passed, and predictions against reality; as a table, as text, on the command line."""

import json
import subprocess
import sys

import pytest

import workbook
from labkit.__main__ import main
from workbook import check
from workbook.notebook import record
from workbook.notebook.pages import Page
from workbook.notebook.progress import Progress
from workbook.notebook.record import Predicted, Record, Tried

AT = "2026-01-01T00:00:00+00:00"
PAGES = [Page("06_ring", "The ring", ("ring.all_reduce", "mean")), Page("07_tree", "A tree", ())]


def tried(status, attempts=1):
    return Tried(status, attempts, AT, AT, AT if status == "passed" else None)


def predicted(value, measured, day=1):
    return Predicted("time", "s", value, AT, measured, None, f"2026-01-{day:02}T00:00:00+00:00")


def test_exercises_are_passed_tried_or_open():
    recorded = Record({"06_ring": {"mean": tried("not yet", 2)}, "07_tree": {}})
    shown = Progress.of(recorded, PAGES, "Kept here.")
    assert shown.tables()[0][1:] == [
        ["06 The ring", "0 of 2", "open: ring.all_reduce; not yet (2 attempts): mean"],
        ["07 A tree", "0 of 0", ""],
    ]
    assert shown.sentences() == ["0 of 2 exercises passed."]


def test_a_scripts_exercise_counts_for_its_page_and_others_have_rows():
    recorded = Record({"": {"mean": tried("passed"), "mine": tried("passed")}, "Untitled": {}})
    recorded.exercises["Untitled"]["other"] = tried("works but not yours yet")
    table = Progress.of(recorded, PAGES, "").tables()[0]
    assert table[1] == ["06 The ring", "1 of 2", "open: ring.all_reduce; passed: mean"]
    assert table[3:] == [
        ["elsewhere", "1 of 1", "passed: mine"],
        ["Untitled", "0 of 1", "works but not yours yet (1 attempt): other"],
    ]


def test_predictions_are_shown_in_the_order_of_their_measurements_and_how_they_develop():
    made = [predicted(1.0, 2.0**-day, day) for day in range(10, 0, -1)]
    recorded = Record({}, {"06_ring": {"time": made}})
    shown = Progress.of(recorded, PAGES, "")
    ratios = [row[-1] for row in shown.tables()[1][1:]]
    assert (ratios[0], ratios[-1]) == ("0.5 ×", "0.000977 ×")
    assert shown.sentences()[1] == (
        "Your last 5 predictions were within a factor of 1,024 of the measurement; "
        "of the 5 before, 32."
    )


@pytest.mark.parametrize(
    ("value", "measured", "factor"),
    [(1, 2, 2), (2, 1, 2), (3, 3, 1), (0, 0, 1), (0, 3, None), (3, 0, None), (-2, 1, None)],
)
def test_the_factor_counts_both_directions_alike(value, measured, factor):
    assert predicted(value, measured).factor == factor


def test_a_prediction_without_measurement_is_not_compared():
    made = Predicted("time", "s", 1.0, AT)
    shown = Progress.of(Record({}, {"06_ring": {"time": [made]}}), PAGES, "")
    assert shown.predictions == []


def test_a_check_records_its_verdict_but_not_that_nothing_is_written_yet(monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/06_ring_all_reduce.ipynb")

    def weighted_mean(x):
        raise NotImplementedError

    check.answers(weighted_mean, {(1,): 2})
    assert record.read().exercises == {}
    check.answers(lambda x: 1, {(1,): 2}, name="ring.weighted_mean")
    check.answers(lambda x: 2, {(1,): 2}, name="ring.weighted_mean")
    one = record.read().exercises["06_ring_all_reduce"]["ring.weighted_mean"]
    assert (one.status, one.attempts) == ("passed", 2)
    assert "passed: ring.weighted_mean" in repr(workbook.progress())


def test_it_is_a_table_whose_words_are_escaped():
    recorded = Record({"a<b": {"c&d": tried("passed")}}, {"a<b": {"q": [predicted(1.0, 2.0)]}})
    page = Progress.of(recorded, PAGES, "")._repr_html_()
    assert page.count("<table>") == 2
    assert "a&lt;b" in page
    assert "c&amp;d" in page


def test_the_command_prints_the_same(capsys):
    workbook.predict("time", "s", value=1).measured(2)
    capsys.readouterr()
    assert main(["progress"]) == 0
    assert capsys.readouterr().out == f"{workbook.progress()!r}\n"
    assert main(["progress", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predictions"][0]["measured"] == 2
    assert found["pages"]["06_ring_all_reduce"]["exercises"]["ring.weighted_mean"] is None


def test_reset_begins_again_and_keeps_the_old_file(capsys):
    path = record.progress_file()[0]
    assert main(["progress", "--reset"]) == 0
    assert "none yet" in capsys.readouterr().out
    record.note_verdict("ring", "passed", True)
    assert main(["progress", "--reset"]) == 0
    (kept,) = path.parent.glob(f"{path.stem}.reset-*.json")
    assert str(kept) in capsys.readouterr().out
    assert "ring" in kept.read_text()
    assert record.read().exercises == {}


def test_turned_off_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_PROGRESS", "off")
    assert "LABKIT_PROGRESS=off is set" in repr(workbook.progress())
    with pytest.raises(SystemExit):
        main(["progress", "--reset"])
    assert "no progress to reset" in capsys.readouterr().err


def test_the_command_does_not_wait_for_torch():
    program = "import sys; from labkit.__main__ import main; main(['progress'])"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; print(sorted(sys.modules))"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "'workbook.notebook.progress'" in done.stdout
    assert "'torch'" not in done.stdout
    assert "'IPython'" not in done.stdout
