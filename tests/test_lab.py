"""``labkit lab``: which folder is served, which page opens, and with which options."""

import urllib.request

import browser
import pytest

from workbook import lab


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    (tmp_path / "workbook" / "notebooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "workbook")
    return tmp_path / "workbook"


@pytest.fixture
def plain_machine(monkeypatch):
    """A desktop: no SSH, no container, a display."""
    for name in ("SSH_CONNECTION", "SSH_TTY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(lab, "CONTAINER_MARKS", ())


def test_the_current_folder_comes_before_the_clone(workbook):
    assert lab.workbook_root() == workbook


def test_it_opens_the_first_notebook_there_is(workbook):
    assert lab.first_page(workbook) == "lab"
    (workbook / "notebooks" / "06_ring.ipynb").touch()
    assert lab.first_page(workbook) == "lab/tree/notebooks/06_ring.ipynb"
    (workbook / "notebooks" / lab.FIRST_NOTEBOOK).touch()
    assert lab.first_page(workbook) == f"lab/tree/notebooks/{lab.FIRST_NOTEBOOK}"


def test_a_desktop_opens_a_browser(plain_machine, workbook):
    assert lab.no_browser_reason() == ""
    assert "--no-browser" not in lab.launch_options(workbook)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.2 22"), "SSH"),
        (lambda patch: patch.setenv("SSH_TTY", "/dev/pts/0"), "SSH"),
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
    assert not list(workbook.glob(".*")), "the served folder is left as it was"
