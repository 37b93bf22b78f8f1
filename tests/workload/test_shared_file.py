"""A data set is in memory once for all processes, and never as somebody else left it."""

import os
import stat
from pathlib import Path

import pytest
import torch

from labkit.workload import shared_file
from labkit.workload.shared_file import shared

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "set"
    (folder / "raw").mkdir(parents=True)
    (folder / "raw" / "images").write_bytes(b"12345")
    return folder


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files that no other test uses."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(shared_file.tempfile, "gettempdir", lambda: str(folder))
    return folder


class Made:
    """Counts how often the tensors are made."""

    def __init__(self, value=7):
        self.value, self.times = value, 0

    def __call__(self):
        self.times += 1
        generator = torch.Generator().manual_seed(self.value)
        images = torch.randint(0, 256, (5, 1, 3, 3), generator=generator, dtype=torch.uint8)
        return {"images": images, "targets": torch.arange(5), "none": torch.zeros(0, 2).long()}


def equal(found, value=7):
    expected = Made(value)()
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def is_mapped(tensor, path):
    """Whether the tensor is in a read-only mapping of the file, as /proc shows it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, mode, *_ = line.split()
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= tensor.data_ptr() < end:
            return str(path) in line and mode == "r--s"
    return False


def test_it_is_made_once_and_mapped(source):
    made, path = Made(), source / ".set.labkit"
    for _ in range(3):
        found = shared(source, "set", made)
        assert equal(found)
        assert is_mapped(found["images"], path)
        assert is_mapped(found["targets"], path)
    assert made.times == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(p.name for p in source.iterdir()) == [".set.labkit", "raw"]


def test_it_is_made_anew_when_the_set_has_changed(source):
    shared(source, "set", Made())
    changes = [
        lambda: (source / "raw" / "images").write_bytes(b"54321"),
        lambda: (source / "raw" / "labels").write_bytes(b"1"),
        lambda: (source / "raw" / "labels").unlink(),
    ]
    for value, change in enumerate(changes):
        change()
        made = Made(value)
        assert equal(shared(source, "set", made), value)
        assert equal(shared(source, "set", made), value)
        assert made.times == 1
    made = Made(9)
    assert equal(shared(source, "other", made), 9)
    assert equal(shared(source, "set", Made(2)), 2)


@pytest.mark.parametrize("place", [0, 30, 2000, 4095, 4096, 4099, 4200, -1])
def test_any_changed_byte_is_noticed(source, place):
    shared(source, "set", Made())
    path = source / ".set.labkit"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    made = Made()
    assert equal(shared(source, "set", made))
    assert made.times == 1


@pytest.mark.parametrize("kept", [0, 10, 4096, 4150, -1])
def test_a_truncated_file_and_other_contents_are_replaced(source, kept):
    shared(source, "set", Made())
    path = source / ".set.labkit"
    whole = path.read_bytes()
    for content in (whole[:kept], b"[]\n", b'{"key": 1}\n', b"\xff\xfe\n", whole + b"1"):
        path.write_bytes(content)
        made = Made()
        assert equal(shared(source, "set", made))
        assert made.times == 1
        assert path.read_bytes() == whole


def hostile_link(path, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(theirs)
    return theirs


def hostile_hard_link(path, tmp_path):
    os.link(path, tmp_path / "theirs")
    return tmp_path / "theirs"


def hostile_mode(path, tmp_path):
    path.chmod(0o666)


def hostile_pipe(path, tmp_path):
    path.unlink()
    os.mkfifo(path)


def hostile_folder(path, tmp_path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "change", [hostile_link, hostile_hard_link, hostile_mode, hostile_pipe, hostile_folder]
)
def test_what_another_user_could_have_written_is_not_mapped(source, tmp_path, change):
    shared(source, "set", Made())
    path = source / ".set.labkit"
    theirs = change(path, tmp_path)
    before = theirs and theirs.read_bytes()
    made = Made()
    found = shared(source, "set", made)
    assert equal(found)
    assert made.times == 1
    # The file of somebody else is replaced, and not written to.
    assert theirs is None or theirs.read_bytes() == before
    if change is not hostile_folder:
        assert is_mapped(found["images"], path)
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (os.getuid(), 0o600)


@needs_root
def test_a_file_of_another_user_is_replaced(source):
    shared(source, "set", Made())
    path = source / ".set.labkit"
    os.chown(path, 12345, 12345)
    made = Made()
    assert is_mapped(shared(source, "set", made)["images"], path)
    assert made.times == 1
    assert path.stat().st_uid == os.getuid()


@pytest.fixture
def read_only(source, monkeypatch):
    """A set in a folder that cannot be written, which root can write all the same."""
    write = shared_file.write_private

    def refusing(path, parts):
        if path.parent == source:
            raise PermissionError(13, "read-only")
        write(path, parts)

    monkeypatch.setattr(shared_file, "write_private", refusing)


@pytest.mark.usefixtures("read_only")
def test_of_a_read_only_folder_it_is_among_the_temporary_files(source, temporary):
    made = Made()
    for _ in range(2):
        found = shared(source, "set", made)
        [path] = temporary.rglob("*.labkit")
        assert is_mapped(found["images"], path)
    assert made.times == 1
    home = temporary / f"labkit-data-{os.getuid()}"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("kind", ["mode", "link", "file"])
def test_a_temporary_folder_that_somebody_else_could_have_made_is_not_used(
    source, temporary, tmp_path, kind
):
    home = temporary / f"labkit-data-{os.getuid()}"
    if kind == "mode":
        home.mkdir()
        home.chmod(0o777)
    elif kind == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        home.symlink_to(tmp_path / "theirs")
    else:
        home.touch()
    made = Made()
    for _ in range(2):
        assert equal(shared(source, "set", made))
    assert made.times == 2
    assert not list(temporary.rglob("*.labkit"))
    assert not list((tmp_path / "theirs").glob("*")) if kind == "link" else True


def test_an_error_of_the_set_is_passed_on_and_nothing_is_left(source):
    def broken():
        raise ValueError("cut off")

    with pytest.raises(ValueError, match="cut off"):
        shared(source, "set", broken)
    assert [path.name for path in source.iterdir()] == ["raw"]
