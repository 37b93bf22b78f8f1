"""The file with a learner's progress: where it is, who writes it, what happens when it is damaged.

That a file is written completely or not at all: tests/test_files.py.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbook.notebook import progress_file, record
from workbook.notebook.record_format import VERSION

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path, monkeypatch):
    path = tmp_path / "data" / "progress.json"
    monkeypatch.setenv("LABKIT_PROGRESS", str(path))
    monkeypatch.setattr(record, "_said", set())
    monkeypatch.setattr(record, "_stores", {})
    return path


def passed_names():
    """In the record as a new process would read it."""
    exercises = record.Store(record.progress_file()[0]).read().exercises
    return [name for of_page in exercises.values() for name, one in of_page.items()]


class TestWhere:
    @pytest.fixture
    def in_a_shell(self, monkeypatch, tmp_path):
        """Call it in the test: pytest sets PYTEST_CURRENT_TEST again before that."""

        def prepare():
            for name in ("LABKIT_PROGRESS", "XDG_DATA_HOME", "CI", "PYTEST_CURRENT_TEST"):
                monkeypatch.delenv(name, raising=False)
            monkeypatch.setenv("HOME", str(tmp_path))
            monkeypatch.setattr(record, "_said", set())
            monkeypatch.setattr(record, "_stores", {})

        return prepare

    def test_in_the_folder_of_the_users_data(self, in_a_shell, tmp_path, monkeypatch):
        in_a_shell()
        default = tmp_path / ".local" / "share" / "labkit" / "progress.json"
        assert record.progress_file() == (default, "")
        monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
        assert record.progress_file() == (default, "")
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        assert record.progress_file()[0] == tmp_path / "data" / "labkit" / "progress.json"

    def test_where_the_user_says(self, in_a_shell, tmp_path, monkeypatch):
        in_a_shell()
        monkeypatch.chdir(tmp_path)
        for named in (str(tmp_path / "mine.json"), "mine.json", "~/mine.json"):
            monkeypatch.setenv("LABKIT_PROGRESS", named)
            assert record.progress_file() == (tmp_path / "mine.json", "")

    @pytest.mark.parametrize(
        "setting",
        [
            {"LABKIT_PROGRESS": "off"},
            {"LABKIT_LIVE": "0", "LABKIT_PROGRESS": "mine.json"},
            {"RANK": "0", "TORCHELASTIC_RUN_ID": "1", "LABKIT_PROGRESS": "mine.json"},
            {"CI": "true"},
            {"PYTEST_CURRENT_TEST": "a test of a notebook"},
        ],
    )
    def test_nowhere_in_ranks_in_tests_and_where_the_user_says_so(
        self, setting, in_a_shell, tmp_path, monkeypatch
    ):
        in_a_shell()
        monkeypatch.chdir(tmp_path)
        for name, value in setting.items():
            monkeypatch.setenv(name, value)
        path, reason = record.progress_file()
        assert path is None
        assert reason
        record.note_verdict("ring", "passed", True)
        assert not list(tmp_path.iterdir())
        assert "ring" in record.store().read().exercises[""]  # as long as the process

    def test_without_a_home_it_is_said_once(self, in_a_shell, monkeypatch, capsys):
        in_a_shell()
        monkeypatch.delenv("HOME")
        assert record.progress_file() == record.progress_file() == (None, "HOME names no folder")
        assert capsys.readouterr().err.count("HOME names no folder") == 1


class TestWriters:
    def test_an_exercise_once_passed_stays_passed(self, path):
        for status in ("not yet", "passed", "not yet"):
            record.note_verdict("ring", status, status == "passed")
        one = record.Store(path).read().exercises[""]["ring"]
        assert (one.status, one.attempts) == ("passed", 3)
        assert one.passed_at
        assert oct(path.parent.stat().st_mode & 0o777) == "0o700"

    def test_any_name_is_recorded(self, path):
        record.note_verdict(["ring"], "passed", True)
        assert passed_names() == ["['ring']"]

    def test_several_processes_lose_nothing(self, path):
        program = (
            "import sys; from workbook.notebook.record import note_verdict\n"
            "for i in range(30): note_verdict(f'{sys.argv[1]} {i}', 'passed', True)\n"
            "for i in range(30): note_verdict('of all', 'not yet', False)"
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        writers = [
            subprocess.Popen([sys.executable, "-c", program, str(number)], env=environment)
            for number in range(4)
        ]
        assert [writer.wait(60) for writer in writers] == [0] * 4
        names = passed_names()
        assert set(names) == {f"{w} {i}" for w in range(4) for i in range(30)} | {"of all"}
        assert record.Store(path).read().exercises[""]["of all"].attempts == 120

    def test_a_lock_that_is_never_given_back_stops_nobody(self, path, monkeypatch, capsys):
        monkeypatch.setattr(progress_file, "WAIT_S", 0.0)
        record.note_verdict("first", "passed", True)
        with (path.parent / ".progress.json.lock").open() as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            record.note_verdict("second", "passed", True)
            record.note_verdict("third", "passed", True)
            assert set(record.store().read().exercises[""]) == {"first", "second", "third"}
            assert passed_names() == ["first"]
        record.note_verdict("fourth", "passed", True)
        assert passed_names() == ["first", "second", "third", "fourth"]
        assert capsys.readouterr().err.count("another process has held its lock") == 1

    def test_where_there_are_no_locks_it_is_written_without(self, path, monkeypatch):
        def refuses(*_):
            raise OSError(progress_file.errno.ENOLCK, "no locks available")

        monkeypatch.setattr(progress_file.fcntl, "flock", refuses)
        record.note_verdict("ring", "passed", True)
        assert passed_names() == ["ring"]

    def test_a_link_stays_a_link(self, path, tmp_path):
        path.parent.mkdir()
        path.symlink_to(tmp_path / "elsewhere.json")
        record.note_verdict("ring", "passed", True)
        assert path.is_symlink()
        assert "ring" in (tmp_path / "elsewhere.json").read_text()

    def test_a_lock_that_is_a_link_is_not_followed(self, path, tmp_path, capsys):
        path.parent.mkdir()
        (path.parent / ".progress.json.lock").symlink_to(tmp_path / "another's file")
        record.note_verdict("ring", "passed", True)
        assert not (tmp_path / "another's file").exists()
        assert "progress is not kept" in capsys.readouterr().err


def tried(**fields):
    whole = {"status": "passed", "attempts": 1, "first_at": "2026-01-01T00:00:00+00:00"}
    whole |= {"last_at": "2026-01-01T00:00:00+00:00", "passed_at": None}
    return whole | fields


def text_of(exercise=None, **fields):
    whole = {"version": VERSION, "exercises": {"": {"ring": exercise or tried()}}}
    return json.dumps({**whole, "predictions": {}, **fields}).encode()


DAMAGED = {
    "half of it": text_of()[:60],
    "not UTF-8": b"\xff\xfe\x00",
    "not JSON": b"passed: ring",
    "nulls": bytes(100),
    "a list": b"[]",
    "a number": b"7",
    "a newer version": text_of(version=VERSION + 1),
    "no version": b"{}",
    "no predictions": text_of(predictions=None),
    "predictions in a list": text_of(predictions=[]),
    "a word for a number": text_of(tried(attempts="many")),
    "no number": text_of(tried(attempts=float("nan"))),
    "more than a float holds": text_of(tried(attempts=10**400)),
    "a time before all calendars": text_of(tried(last_at="0001-01-01T00:00:00+23:59")),
    "no time": text_of(tried(last_at="yesterday")),
    "an unknown field": text_of(tried(colour="red")),
    "a missing field": text_of({"status": "passed"}),
    "deep": b"[" * 100_000,
    "digits without end": b'{"version": ' + b"1" * 10_000 + b"}",
}


class TestDamaged:
    @pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
    def test_it_is_said_once_kept_under_another_name_and_begun_again(self, path, content, capsys):
        path.parent.mkdir()
        path.write_bytes(content)
        assert record.store().read().exercises == {}
        record.note_verdict("tree", "passed", True)
        assert passed_names() == ["tree"]
        (kept,) = path.parent.glob("progress.damaged-*.json")
        assert kept.read_bytes() == content
        said = capsys.readouterr().err
        assert said.count("damaged (") == 1
        assert kept.name in said

    def test_a_check_that_meets_it_first_is_recorded(self, path):
        path.parent.mkdir()
        path.write_bytes(b"{")
        record.note_verdict("tree", "passed", True)
        assert passed_names() == ["tree"]
        assert len(list(path.parent.glob("progress.damaged-*.json"))) == 1

    def test_a_whole_one_and_an_empty_one_are_not_damaged(self, path, capsys):
        path.parent.mkdir()
        path.write_bytes(text_of())
        assert passed_names() == ["ring"]
        path.write_bytes(b"")
        assert passed_names() == []
        assert not capsys.readouterr().err

    def test_a_large_one_is_not_read(self, path):
        path.parent.mkdir()
        with path.open("wb") as file:
            file.truncate(10**12)
        assert passed_names() == []
        assert len(list(path.parent.glob("progress.damaged-*.json"))) == 1

    def test_a_folder_is_set_aside_with_what_is_in_it(self, path):
        (path / "in it").mkdir(parents=True)
        record.note_verdict("tree", "passed", True)
        assert passed_names() == ["tree"]
        (kept,) = path.parent.glob("progress.damaged-*.json")
        assert (kept / "in it").is_dir()

    def test_another_folder_stays_where_it_is(self, tmp_path, path, monkeypatch, capsys):
        """LABKIT_PROGRESS may name somebody's home."""
        monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path))
        record.note_verdict("tree", "passed", True)
        assert tmp_path.is_dir()
        assert "it is not a file" in capsys.readouterr().err

    def test_a_pipe_is_neither_waited_for_nor_renamed(self, path, capsys):
        path.parent.mkdir()
        os.mkfifo(path)
        record.note_verdict("tree", "passed", True)
        assert record.store().read().exercises[""]["tree"].passed_at
        assert path.is_fifo()
        assert capsys.readouterr().err.count("labkit: ") == 1


READ_ONLY = """
mount -t tmpfs -o ro labkit "$1" || exit 77
export LABKIT_PROGRESS="$1/progress.json"
exec "$2" -c "
from workbook.notebook import record
for name in ('ring', 'tree'):
    record.note_verdict(name, 'passed', True)
print(sorted(record.store().read().exercises['']))
"
"""


class TestNoPlace:
    def test_a_folder_that_cannot_be_written_is_said_once_and_the_lesson_goes_on(self, tmp_path):
        command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(tmp_path)]
        with contextlib.suppress(FileNotFoundError):
            done = subprocess.run(
                [*command, sys.executable],
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                timeout=240,
            )
            if done.returncode != 77 and "unshare" not in done.stderr:
                assert done.stdout == "['ring', 'tree']\n"
                assert done.stderr.count("progress is not kept") == 1
                assert "Read-only file system" in done.stderr
                return
        pytest.skip("this user may not mount")

    def test_a_file_in_the_place_of_a_folder(self, path, capsys):
        path.parent.write_text("a file")
        record.note_verdict("ring", "passed", True)
        assert list(record.store().read().exercises[""]) == ["ring"]
        assert capsys.readouterr().err.count("labkit: ") == 1
