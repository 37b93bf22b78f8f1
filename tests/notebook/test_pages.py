import json

import nbformat
import pytest

from workbook.notebook import pages
from workbook.notebook.pages import Page, exercises_in, workbook_pages

NOTEBOOKS = pages.Path(__file__).parents[2] / "notebooks"
STATES = ("passed: ", "not yet: ", "not attempted yet: ", "works")


def named_by_verdicts(path):
    """The names in the stored outputs of a page's checks."""
    outputs = [
        output.text
        for cell in nbformat.read(path, as_version=4).cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.text.startswith(STATES)
    ]
    return [text.partition("\n")[0].partition(": ")[2] for text in outputs]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_pages_exercises_have_the_names_of_their_verdicts(path):
    (page,) = [page for page in workbook_pages() if page.name == path.stem]
    assert list(page.exercises) == named_by_verdicts(path)
    assert page.title


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("check.ring.share_only(mine, to='left')", ["ring.share_only"]),
        ("workbook.check.ring.all_reduce(mine)", ["ring.all_reduce"]),
        ("check.ring.all_reduce(mine).own_run()", ["ring.all_reduce"]),
        ("check.returns(gather, value, target=check.Target(1))", ["gather"]),
        ("check.answers(fn, {}, name='choose')", ["choose"]),
        ("e = check.Exercise('half', judge=j)\ncheck.grade(half, e)", ["half"]),
        ("verdict = check.tree.all_reduce(a) or check.naive.all_reduce(b)", None),
        ("%time check.ring.all_reduce(mine)", []),
        ("check.answers(lambda x: x, {})", []),
    ],
)
def test_a_cells_checks_are_read_and_not_run(source, names):
    found = exercises_in(source)
    assert sorted(found) == (
        sorted(names) if names is not None else ["naive.all_reduce", "tree.all_reduce"]
    )


def test_the_notebooks_in_the_current_folder_come_first(tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    cells = [
        {"cell_type": "markdown", "source": ["# A page\n", "and text"]},
        {"cell_type": "code", "source": "check.answers(fn, {})"},
    ]
    (folder / "06_page.ipynb").write_text(json.dumps({"cells": cells}))
    (folder / "07_damaged.ipynb").write_text('{"cells": 7}')
    (folder / "08_half.ipynb").write_text("{")
    for place in (tmp_path, folder):
        monkeypatch.chdir(place)
        assert workbook_pages() == [Page("06_page", "A page", ("fn",))]


def test_without_notebooks_there_are_no_pages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        pages, "__file__", str(tmp_path / "site" / "workbook" / "notebook" / "p.py")
    )
    assert workbook_pages() == []


def test_the_open_page_is_known_from_jupyter(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert pages.current_page() == ""
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/somebody/notebooks/06_ring.ipynb")
    assert pages.current_page() == "06_ring"
    monkeypatch.setenv("JPY_SESSION_NAME", "console-1")
    assert pages.current_page() == ""
