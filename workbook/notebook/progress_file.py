"""The file with a learner's progress: several kernels may write it, and damage is never lost."""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from labkit.files import write_atomically
from workbook.notebook.record_format import Record, from_json, to_json

# A record has some kilobytes; something larger is not one.
MAX_BYTES = 2**24
# A writer holds the lock for milliseconds; one that was stopped must not stop the lesson.
WAIT_S = 3.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from writing ``path``, by a lock on a file beside it.

    Where the file system has no locks, it goes on without one.

    Raises:
        OSError: the folder cannot be written, or another process holds the lock for too long.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path.with_name(f".{path.name}.lock"), flags, 0o600)
    try:
        _take(descriptor)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"another process has held its lock for {WAIT_S:g} s"
                ) from None
            time.sleep(0.01)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise


class DamagedError(ValueError):
    """The file is not a record that this labkit can read."""


def read_record(path: Path) -> Record:
    """Read the record, which needs no lock; no file, or an empty one, is an empty record.

    Raises:
        DamagedError: it is not a record.
        OSError: it cannot be read, or is neither a file nor a folder.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return Record()
    if stat.S_ISDIR(found.st_mode) and path.suffix == ".json":
        raise DamagedError("it is a folder")
    # Opening a pipe would wait, and a device is nobody's record.
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a file")
    if found.st_size > MAX_BYTES:
        raise DamagedError(f"it has more than {MAX_BYTES:,} bytes")
    try:
        return from_json(path.read_bytes())
    except ValueError as error:
        raise DamagedError(str(error)) from None


def read_or_set_aside(path: Path, say: Callable[[str], None]) -> Record:
    """Read the record; rename a damaged file and ``say`` so. The caller holds the lock.

    Raises:
        OSError: it can neither be read nor be renamed.
    """
    try:
        return read_record(path)
    except DamagedError as error:
        moved = set_aside(path, "damaged")
        say(f"{path} is damaged ({error}): it is kept as {moved.name}, and a new one is begun")
        return Record()


def write_record(path: Path, record: Record) -> None:
    """Replace the file by the record.

    Raises:
        OSError, ValueError: it cannot be written; the old one is as it was.
    """
    write_atomically(path, to_json(record))


def set_aside(path: Path, why: str) -> Path:
    """Rename the file to a name that is free, with ``why`` and the time in it.

    Raises:
        OSError: the folder does not allow it.
    """
    path = Path(os.path.realpath(path))
    mark = f"{why}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    moved = path.with_name(f"{path.stem}.{mark}{path.suffix}")
    os.rename(path, moved)
    return moved
