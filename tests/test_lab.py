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
    assert main(["reset", "00"]) == 0
    assert lab.first_page(workbook) == "lab/tree/my_course/00_start_here.ipynb"


def test_where_no_browser_can_open_none_does(workbook, monkeypatch):
    monkeypatch.setattr(lab.sys, "platform", "linux")
    monkeypatch.setattr(lab, "CONTAINER_MARKS", ())
    for name in ("SSH_CONNECTION", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    assert "--no-browser" not in lab.launch_options(workbook)
    monkeypatch.delenv("DISPLAY")
    assert "--no-browser" in lab.launch_options(workbook)


def test_an_option_of_the_users_own_takes_the_place_of_ours(workbook, monkeypatch):
    served = []
    monkeypatch.setattr(lab, "_serve", lambda root, argv: served.extend(argv) or 0)
    name = "--KernelProvisionerFactory.default_provisioner_name"
    lab.main([f"{name}=local-provisioner", "--port=9000"])
    assert [option for option in served if option.startswith(name)] == [
        f"{name}=local-provisioner"
    ]
    assert "--port=9000" in served


@pytest.mark.fresh
def test_it_serves_and_one_interrupt_ends_it(tmp_path, workbook):
    with browser.serve(tmp_path, workbook) as address:
        assert urllib.request.urlopen(address, timeout=20).status == 200
        assert list((tmp_path / "runtime").glob("jpserver-*"))
    assert "The workbook is closed." in (tmp_path / "jupyterlab.log").read_text()
    assert not list((tmp_path / "runtime").glob("jpserver-*"))
    assert sorted(path.name for path in workbook.iterdir()) == ["my_course", "notebooks"]
