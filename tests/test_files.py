"""Files are written completely or not at all, and only regular files are read and written."""

import contextlib
import os
import resource

import pytest

from labkit.engine.errors import OutputError
from labkit.engine.files import check_regular, check_writable, write_atomically


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


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path):  # row 28
    path = tmp_path / "out.json"
    path.write_text("old")
    with at_most(100), pytest.raises(OutputError, match=rf"cannot write {path}: File too large"):
        write_atomically(path, "new" * 100)
    assert (names(tmp_path), path.read_text()) == (["out.json"], "old")


def test_a_file_takes_the_place_of_a_link_and_not_of_its_target(tmp_path):
    target, link = tmp_path / "theirs", tmp_path / "out"
    target.write_text("theirs")
    link.symlink_to(target)
    write_atomically(link, b"mine")
    assert (target.read_text(), link.read_text()) == ("theirs", "mine")


def test_only_regular_files_are_read_and_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null", tmp_path):
        with pytest.raises(ValueError, match=f"cannot write {path}"):
            write_atomically(path, "text")
        with pytest.raises(ValueError, match=f"cannot read {path}: it is not a regular file"):
            check_regular(path)
    for path in ("", tmp_path / "absent" / "out", f"{tmp_path}/out/"):
        with pytest.raises(ValueError, match="give a file in a folder that exists"):
            check_writable(path)


def test_two_outputs_are_two_files(tmp_path):
    (tmp_path / "link").symlink_to("out")
    check_writable(tmp_path / "out", None, tmp_path / "other")
    for name in ("out", "link", f"../{tmp_path.name}/out"):
        with pytest.raises(ValueError, match="are the same file: give two files"):
            check_writable(tmp_path / "out", f"{tmp_path}/{name}")
