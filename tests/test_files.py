"""A file is written completely or not at all; links, pipes and devices stay what they are."""

import contextlib
import os
import re
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from labkit.errors import OutputError
from labkit.files import check_outputs, check_writable, is_same_file, write_atomically, write_each

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="making a device takes root")


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def null(tmp_path):
    """A null device made for the test: no test may touch that of the system."""
    path = tmp_path / "null"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this container may not make devices")
    return path


@contextlib.contextmanager
def at_most(num_bytes):
    """Limit the size of files that this process writes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_old_file_stays_when_writing_fails(tmp_path):  # row 28
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path):
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    with at_most(1000), pytest.raises(OutputError, match=r"cannot write .*result\.json: File too"):
        write_atomically(path, b"x" * 100_000)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_and_text_replace_what_was_there(tmp_path):
    path = tmp_path / "result"
    write_atomically(path, "text")
    write_atomically(path, b"bytes")
    assert path.read_bytes() == b"bytes"


def test_an_old_file_keeps_its_mode_and_a_new_one_has_the_umask_s(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.touch()
    old.chmod(0o640)
    before = os.umask(0o027)
    try:
        write_atomically(old, "a")
        write_atomically(new, "a")
        old.chmod(0o604)
        write_atomically(old, "b")
    finally:
        os.umask(before)
    assert stat.S_IMODE(old.stat().st_mode) == 0o604
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


@needs_root
def test_an_old_file_keeps_its_owner(tmp_path):
    path = tmp_path / "theirs"
    path.touch()
    os.chown(path, 12345, 54321)
    write_atomically(path, "a")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to("folder/target")
    for text in ("new", "newer"):  # at first, the link has no target
        write_atomically(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert names(tmp_path / "folder") == ["target"]


@needs_root
def test_a_device_is_written_to_and_stays_a_device(null):
    before = null.stat()
    write_atomically(null, "text")
    assert stat.S_ISCHR(null.stat().st_mode)
    assert null.stat().st_ino == before.st_ino
    assert names(null.parent) == ["null"]


def test_a_pipe_passes_on_what_is_written_and_stays_a_pipe(pipe):
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    # Writing fails until the reader has opened the pipe.
    for _ in range(1000):
        with contextlib.suppress(OutputError):
            write_atomically(pipe, b"x" * 200_000)
            break
        reader.join(0.01)
    reader.join(10)
    assert read == [b"x" * 200_000]
    assert pipe.is_fifo()


def test_a_pipe_that_nobody_reads_is_an_error_and_no_hang(pipe):
    with pytest.raises(OutputError, match=r"cannot write .*pipe: nobody reads from it"):
        write_atomically(pipe, "text")
    assert pipe.is_fifo()


def test_stdout_keeps_what_was_printed_before_and_after(tmp_path):
    program = "from labkit.files import write_atomically\n"
    program += "print('before'); write_atomically('/dev/stdout', 'record\\n'); print('after')"
    command = [sys.executable, "-c", program]
    log = tmp_path / "log"
    with log.open("w") as sink:
        subprocess.run(command, stdout=sink, check=True, timeout=240)
    piped = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    assert log.read_text() == piped.stdout == "before\nrecord\nafter\n"


def test_what_can_never_be_written_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "astray").symlink_to("nowhere/file")
    for name in ("folder", "nowhere/file", "file/below", "loop", "astray", "n" * 300):
        with pytest.raises(ValueError, match="cannot write "):
            check_writable(tmp_path / name)
    with pytest.raises(ValueError, match="cannot write '': give a file"):
        check_writable("")


@needs_root
def test_a_disk_is_refused(tmp_path):
    path = tmp_path / "disk"
    try:
        os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(7, 250))
    except PermissionError:
        pytest.skip("this container may not make devices")
    with pytest.raises(ValueError, match="neither a file, a pipe nor a character device"):
        write_atomically(path, "text")
    assert path.is_block_device()


def test_one_file_has_many_names(tmp_path):
    (tmp_path / "folder").mkdir()
    file, other = tmp_path / "file", tmp_path / "other"
    (tmp_path / "link").symlink_to("file")
    for path in (tmp_path / "folder" / ".." / "file", tmp_path / "link", tmp_path / "FILE", file):
        assert is_same_file(file, path), "not there yet"
    assert not is_same_file(file, other)
    file.touch()
    os.link(file, other)
    assert is_same_file(file, other)
    with pytest.raises(ValueError, match=r"--json .*file and --save .*other are the same file"):
        check_outputs({"--json": str(file), "--save": str(other)}, {})
    with pytest.raises(ValueError, match=r"--json .*file and --from .*link are the same file"):
        check_outputs({"--json": str(file)}, {"--from": str(tmp_path / "link")})
    check_outputs({"--json": str(file), "--save": None}, {"--from": None})


def test_one_file_that_fails_costs_no_other(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    with at_most(1000), pytest.raises(OutputError, match=r"cannot write .*bad: .*; cannot write"):
        write_each(
            lambda: write_atomically(bad, b"x" * 100_000),
            lambda: write_atomically(good, "small"),
            lambda: write_atomically(bad, b"x" * 100_000),
        )
    assert names(tmp_path) == ["good"]


def test_nobody_else_writes_files():
    """Code that writes without this module could replace a device, or leave half a file."""
    root = Path(__file__).resolve().parents[1]
    folders = ("labkit/**", "workbook/**", "tools", "data")
    paths = [path for folder in folders for path in root.glob(f"{folder}/*.py")]
    writes = re.compile(
        r"\.write_(text|bytes)\(|\bopen\([^)]*[\"'][wax]b?\+?[\"']|savefig\([\"'p]|O_APPEND|FileIO\("
    )
    found = {path.name for path in paths if writes.search(path.read_text())}
    # Into folders of their own, to their stdout, or into /proc.
    own = {"lab.py", "nccl_sharing.py", "processes.py", "worker.py", "peak_memory.py"}
    # A log grows line by line; a checkpoint's folder is renamed as a whole.
    own |= {"logs.py", "stream.py", "run_program.py"}
    # Makes environments before labkit can be imported; beside, then renamed.
    own |= {"other_framework.py"}
    assert found <= {"files.py"} | own
