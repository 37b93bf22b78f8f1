"""What is passed, and predictions against reality; as a table, as text, on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import workbook
from labkit.__main__ import main
from workbook.exercises.grader.exercise import Exercise
from workbook.exercises.grader.grader import grade
from workbook.notebook import pages, record
from workbook.notebook.pages import Page, workbook_pages
from workbook.notebook.progress import Progress
from workbook.notebook.record import Predicted, Record, Tried

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
STATES = ("passed: ", "not yet: ", "not attempted yet: ", "works")
AT = "2026-01-01T00:00:00+00:00"
PAGES = [Page("06_ring", "The ring", {"ring.all_reduce": "All of it", "mean": "A mean"})]


def tried(status, attempts=1):
    return Tried(status, attempts, AT, AT, AT if status == "passed" else None)


def predicted(value, measured, day=1):
    return Predicted("time", "s", value, AT, measured, None, f"2026-01-{day:02}T00:00:00+00:00")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_pages_exercises_have_the_names_of_their_verdicts(path):
    (page,) = [page for page in workbook_pages() if page.name == path.stem]
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    texts = [output.text for output in outputs if output.output_type == "stream"]
    said = [text.partition("\n")[0] for text in texts if text.startswith(STATES)]
    assert list(page.exercises) == [text.partition(": ")[2] for text in said]
    assert page.title
    assert page.first_choice in page.exercises


def test_the_notebooks_in_the_current_folder_come_first(tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    cells = [
        {"cell_type": "markdown", "source": ["# A page\n", "and\n### Exercise 1: all"]},
        {"cell_type": "code", "source": "check.ring.all_reduce(mine).own_run()"},
    ]
    (folder / "06_page.ipynb").write_text(json.dumps({"cells": cells}))
    (folder / "07_damaged.ipynb").write_text('{"cells": 7}')
    (folder / "08_half.ipynb").write_text("{")
    for place in (tmp_path, folder):
        monkeypatch.chdir(place)
        assert workbook_pages() == [
            Page("06_page", "A page", {"ring.all_reduce": "Exercise 1: all"})
        ]


def test_the_open_page_is_known_from_jupyter(monkeypatch):
    for name, page in (("", ""), ("/there/06_ring.ipynb", "06_ring"), ("console-1", "")):
        monkeypatch.setenv("JPY_SESSION_NAME", name)
        assert pages.current_page() == page


def test_exercises_are_passed_tried_or_open_and_others_have_rows():
    """One that was passed on the page where it was before counts where it is now."""
    recorded = Record({"06_ring": {"mean": tried("not yet", 2)}, "<Untitled>": {}})
    recorded.exercises["<Untitled>"]["other"] = tried("works but not yours yet")
    recorded.exercises["05_before"] = {"ring.all_reduce": tried("passed")}
    recorded.exercises[""] = {"ring.all_reduce": tried("not yet"), "mine": tried("passed")}
    shown = Progress.of(recorded, PAGES, "Kept here.")
    assert repr(shown).splitlines() == [
        "06 The ring: 1 of 2 passed",
        "    All of it ✓",
        "    A mean (not yet, 2 attempts)",
        "<Untitled>: 0 of 1 passed",
        "    other (works but not yours yet, 1 attempt)",
        "elsewhere: 1 of 1 passed",
        "    mine ✓",
        "",
        "2 of 4 exercises passed.",
        "Kept here.",
    ]
    page = shown._repr_html_()
    assert "&lt;Untitled&gt;" in page
    assert '<a href="06_ring.ipynb#All-of-it">All of it</a> ✓' in page


def test_predictions_are_shown_in_the_order_of_their_measurements():
    made = [predicted(1.0, 2.0**-day, day) for day in range(10, 0, -1)]
    made.append(Predicted("time", "s", 1.0, AT))  # not measured
    shown = Progress.of(Record({}, {"06_ring": {"time": made}}), PAGES, "")
    ratios = [row[-1] for row in shown.rows()]
    assert (ratios[0], ratios[-1]) == ("0.5", "0.000977")
    assert "factor of 1,024" in shown.sentences()[1]
    factors = [predicted(*numbers).factor for numbers in ((1, 2), (2, 1), (0, 3), (-2, 1))]
    assert factors == [2, 2, None, None]


def test_a_check_records_its_verdict_but_not_that_nothing_is_written_yet(monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/06_ring_all_reduce.ipynb")

    def weighted_mean(x):
        raise NotImplementedError

    exercise = Exercise(
        "ring.weighted_mean",
        lambda rank, case: 2,
        inputs=lambda rank, case: (1,),
        signature="x",
        written=None,
        call=lambda fn, comm, x: fn(x),
        sizes=(),
    )
    grade(weighted_mean, exercise, (1,))
    assert record.read().exercises == {}
    grade(lambda x: 1, exercise, (1,))
    grade(lambda x: 2, exercise, (1,))
    one = record.read().exercises["06_ring_all_reduce"]["ring.weighted_mean"]
    assert (one.status, one.attempts) == ("passed", 2)
    assert "a weighted mean in one all-reduce ✓" in repr(workbook.progress())


def test_the_command_prints_the_same(capsys, monkeypatch):
    workbook.predict("time", "s", value=1).measured(2)
    capsys.readouterr()
    assert main(["progress"]) == 0
    assert capsys.readouterr().out == f"{workbook.progress()!r}\n"
    monkeypatch.setenv("LABKIT_PROGRESS", "off")
    assert "LABKIT_PROGRESS=off is set" in repr(workbook.progress())


def test_the_command_does_not_wait_for_torch():
    program = "import sys; from labkit.__main__ import main; main(['progress'])"
    command = [sys.executable, "-c", f"{program}; print(sorted(sys.modules))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "'workbook.notebook.progress'" in done.stdout
    assert "'torch'" not in done.stdout
