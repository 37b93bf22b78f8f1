"""Half a file is never left."""

import pytest

from labkit.files import write_atomically


def test_the_old_file_stays_when_writing_fails(tmp_path):  # row 28
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_and_text_replace_what_was_there(tmp_path):
    path = tmp_path / "result"
    write_atomically(path, "text")
    write_atomically(path, b"bytes")
    assert path.read_bytes() == b"bytes"
