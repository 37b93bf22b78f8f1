"""``labkit lab``: which folder is served, which page opens, and with which options."""

import urllib.request

import browser
import nbformat
import pytest

from labkit.__main__ import main
from workbook import lab


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    (tmp_path / "workbook" / "notebooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "workbook")
    return tmp_path / "workbook"


@pytest.fixture
def plain_machine(monkeypatch):
    """A desktop: no SSH, no container, a display."""
    for name in ("SSH_CONNECTION", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(lab, "CONTAINER_MARKS", ())


def test_the_current_folder_comes_before_the_clone(workbook):
    assert lab.workbook_root() == workbook


def write(path, *sources, outputs=()):
    cells = [nbformat.v4.new_code_cell(source, outputs=[*outputs]) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def sources(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


def test_the_learners_copy_follows_the_course_and_keeps_what_the_learner_wrote(workbook, capsys):
    pages, mine = workbook / "notebooks", workbook / "my_course"
    output = nbformat.v4.new_output("stream", text="42")
    for name in ("00_start_here.ipynb", "06_ring.ipynb", "07_yours.ipynb"):
        write(pages / name, "print(42)", outputs=[output])
    assert lab.renew_course(workbook) == []
    assert lab.first_page(workbook) == "lab/tree/my_course/00_start_here.ipynb"
    copied = nbformat.read(mine / "06_ring.ipynb", as_version=4)
    assert [cell.outputs for cell in copied.cells] == [[]]
    # Page 06 was run, 07 was written into; then the course has new versions of all.
    copied.cells[0].outputs = [output]
    nbformat.write(copied, mine / "06_ring.ipynb")
    answer = nbformat.read(mine / "07_yours.ipynb", as_version=4)
    answer.cells[0].source = "print(6 * 7)"
    nbformat.write(answer, mine / "07_yours.ipynb")
    assert lab.renew_course(workbook) == []
    for path in pages.glob("*.ipynb"):
        write(path, "print(43)")
    assert lab.renew_course(workbook) == ["07_yours.ipynb"]
    assert sources(mine / "06_ring.ipynb") == ["print(43)"]
    assert sources(mine / "07_yours.ipynb") == ["print(6 * 7)"]
    assert main(["reset", "07"]) == 0
    assert "07_yours-before-1.ipynb" in capsys.readouterr().out
    assert sources(mine / "07_yours.ipynb") == ["print(43)"]
    assert sources(mine / "07_yours-before-1.ipynb") == ["print(6 * 7)"]
    with pytest.raises(SystemExit):
        main(["reset", "0"])


def test_a_copy_that_cannot_be_read_is_the_learners(workbook):
    write(workbook / "notebooks" / "06_ring.ipynb", "print(42)")
    (workbook / "my_course").mkdir()
    (workbook / "my_course" / "06_ring.ipynb").write_text("{")
    assert lab.renew_course(workbook) == ["06_ring.ipynb"]
    assert (workbook / "my_course" / "06_ring.ipynb").read_text() == "{"


def test_links_of_a_page_hold_in_the_copy(workbook):
    (workbook / "notebooks" / "scripts").mkdir()
    lab.renew_course(workbook)
    assert (workbook / "my_course" / "scripts").resolve() == workbook / "notebooks" / "scripts"


def test_a_desktop_opens_a_browser(plain_machine, workbook):
    assert lab.no_browser_reason() == ""
    assert "--no-browser" not in lab.launch_options(workbook)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.2 22"), "SSH"),
        (lambda patch: patch.setattr(lab, "CONTAINER_MARKS", (__file__,)), "container"),
        (lambda patch: patch.delenv("DISPLAY"), "display"),
    ],
)
def test_where_no_browser_can_open_none_does(change, reason, plain_machine, workbook, monkeypatch):
    monkeypatch.setattr(lab.sys, "platform", "linux")
    change(monkeypatch)
    assert reason in lab.no_browser_reason()
    assert "--no-browser" in lab.launch_options(workbook)


@pytest.mark.fresh
def test_it_serves_and_one_interrupt_ends_it(tmp_path, workbook):
    with browser.serve(tmp_path, workbook) as address:
        assert urllib.request.urlopen(address, timeout=20).status == 200
        assert list((tmp_path / "runtime").glob("jpserver-*"))
    assert "The workbook is closed." in (tmp_path / "jupyterlab.log").read_text()
    assert not list((tmp_path / "runtime").glob("jpserver-*"))
    assert sorted(path.name for path in workbook.iterdir()) == ["my_course", "notebooks"]
