"""The file with a learner's progress: where it is, and who writes it.

That it is damaged or cannot be written: tests/engine/runtime/test_fault_table.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from workbook.notebook import record

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    path = tmp_path / "data" / "progress.json"
    monkeypatch.setenv("LABKIT_PROGRESS", str(path))
    monkeypatch.setattr(record, "_reported_files", set())
    monkeypatch.setattr(record, "_pending", {})
    return path


def in_the_file(monkeypatch):
    """The names of the exercises as a new process would read them."""
    with monkeypatch.context() as patch:
        patch.setattr(record, "_pending", {})
        return [name for of_page in record.read().exercises.values() for name in of_page]


def test_where_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("LABKIT_PROGRESS")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for data in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_DATA_HOME", data)
        default = tmp_path / ".local" / "share" / "labkit" / "progress.json"
        assert record.progress_file() == (default, "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert record.progress_file()[0] == tmp_path / "data" / "labkit" / "progress.json"
    for named in (str(tmp_path / "mine.json"), "mine.json", "~/mine.json"):
        monkeypatch.setenv("LABKIT_PROGRESS", named)
        assert record.progress_file() == (tmp_path / "mine.json", "")


@pytest.mark.parametrize(
    "setting",
    [
        {"LABKIT_PROGRESS": "off"},
        {"LABKIT_LIVE": "0"},
        {"RANK": "0", "TORCHELASTIC_RUN_ID": "1"},
    ],
)
def test_it_is_nowhere_in_ranks_and_where_the_user_says_so(setting, path, monkeypatch):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert record.progress_file()[0] is None
    record.note_verdict("ring", "passed", True)
    assert not path.parent.exists()
    assert "ring" in record.read().exercises[""]  # as long as the process


def test_an_exercise_once_passed_stays_passed(path):
    for status in ("not yet", "passed", "not yet"):
        record.note_verdict("ring", status, status == "passed")
    one = record.read().exercises[""]["ring"]
    assert (one.status, one.attempts) == ("passed", 3)
    assert one.passed_at
    assert oct(path.parent.stat().st_mode & 0o777) == "0o700"


def test_what_was_recorded_on_a_page_follows_it_to_another_number(monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "97_ring_all_reduce.ipynb")
    record.note_verdict("ring.all_reduce", "passed", True)
    made = record.Predicted("bytes", "B", 3.0, record.now())
    record.note_prediction("97_ring_all_reduce", "bytes", made)
    stored = record.read()
    assert list(stored.exercises) == ["06_ring_all_reduce"]
    assert stored.predictions == {"06_ring_all_reduce": {"bytes": [made]}}


def test_several_processes_lose_nothing(monkeypatch):
    program = (
        "import sys; from workbook.notebook import record\nrecord.LOCK_S = 60\n"
        "for i in range(30): record.note_verdict(f'{sys.argv[1]} {i}', 'passed', True)\n"
        "for i in range(30): record.note_verdict('of all', 'not yet', False)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(number)], env=environment)
        for number in range(4)
    ]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    names = {f"{w} {i}" for w in range(4) for i in range(30)} | {"of all"}
    assert set(in_the_file(monkeypatch)) == names
    assert record.read().exercises[""]["of all"].attempts == 120


def test_a_lock_that_is_never_given_back_stops_nobody(path, monkeypatch, capsys):
    monkeypatch.setattr(record, "LOCK_S", 0.0)
    record.note_verdict("first", "passed", True)
    with FileLock(path.parent / ".progress.json.lock"):
        record.note_verdict("second", "passed", True)
        record.note_verdict("third", "passed", True)
        assert set(record.read().exercises[""]) == {"first", "second", "third"}
        assert in_the_file(monkeypatch) == ["first"]
    record.note_verdict("fourth", "passed", True)
    assert in_the_file(monkeypatch) == ["first", "second", "third", "fourth"]
    assert capsys.readouterr().err.count("progress is not kept") == 1
