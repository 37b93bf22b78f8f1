"""A folder of checkpoints: its names, its lock, and what may be removed from it.

Only what a run has certainly written is ever removed: nothing behind a link, nothing of another
user, and no folder in which there is anything else.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import stat
import time
import weakref
from pathlib import Path

from labkit.errors import OutputError

FACTS, METADATA, BEST, LOCK = "labkit.json", ".metadata", "best", ".labkit-lock"
_STEP = re.compile(r"step-(\d{8,18})")
_UNFINISHED = re.compile(r"\.labkit-[0-9a-f]{16}\.part")
# What torch.distributed.checkpoint and this package put into a checkpoint.
_OURS = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|labkit\.json")
_POLL_S = 0.1
# Where a file system has no locks, a run goes on without one.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` updates is: ``step-00000120``."""
    return folder / f"step-{step:08d}"


def steps(folder: str | Path) -> list[tuple[int, Path]]:
    """(step, path) of all that is named like a checkpoint, the newest first; may be damaged."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [(int(match[1]), Path(folder, name)) for name in names if (match := _match(name))]
    return sorted(found, reverse=True)


def _match(name: str) -> re.Match[str] | None:
    found = _STEP.fullmatch(name)
    return found if found and name == step_path(Path(), int(found[1])).name else None


def check_folder(folder: str | Path, patience_s: float = 0.0) -> None:
    """Refuse a folder into which no checkpoint can be written, before a run and not during it.

    Args:
        folder: of the checkpoints.
        patience_s: how long to wait for another run there to end. Ranks whose launcher was killed
            notice it a moment later.

    Raises:
        ValueError: it is not a folder and cannot be made, may not be written to, or another run
            is writing to it.
    """
    path = Path(os.path.abspath(folder))
    try:
        there = next(one for one in (path, *path.parents) if one.exists() or one.is_symlink())
    except OSError as error:
        raise ValueError(f"cannot write checkpoints to {folder}: {error.strerror}") from None
    if not str(folder) or not there.is_dir():
        raise ValueError(
            f"cannot write checkpoints to {str(folder) or repr('')}: {there} is not a folder"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"cannot write checkpoints to {folder}: no permission to write to {there}"
        )
    until_s = time.monotonic() + patience_s
    while (path / LOCK).exists():
        try:
            Lock(path).release()
            return
        except OutputError as error:
            if time.monotonic() > until_s:
                raise ValueError(str(error)) from None
        time.sleep(_POLL_S)


class Lock:
    """The right to write to a folder; it ends with this process, however that ends.

    Raises:
        OutputError: another run has it, or the file of the lock cannot be used.
    """

    def __init__(self, folder: Path):
        self.path = folder / LOCK
        # Never a link, which another user could have put there; nor may others open it, who
        # could keep the lock.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(self.path, flags, 0o600)
            _held.add(self)
            self.works = self._take()
        except OSError as error:
            self.release()
            raise _lock_error(folder, self.path, error) from None

    def _take(self) -> bool:
        assert self._descriptor is not None
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give the lock back."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.close()

    def close(self) -> None:
        """Close its file in this process; a parent that has forked this process keeps the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _close_all() -> None:
    for lock in list(_held):
        lock.close()


# A lock lasts as long as any process has its file open: a DataLoader's worker, a fork of its
# rank, may outlive the rank for seconds.
os.register_at_fork(after_in_child=_close_all)


def _lock_error(folder: Path, path: Path, error: OSError) -> OutputError:
    if error.errno in (errno.EWOULDBLOCK, errno.EACCES) and isinstance(error, BlockingIOError):
        return OutputError(
            f"cannot write checkpoints to {folder}: another run is writing there. Give this run "
            "another folder, or end that run first"
        )
    return OutputError(f"cannot write checkpoints to {folder}: {path.name}: {error.strerror}")


def hidden(folder: Path) -> Path:
    """A new name for what is not whole yet, or no longer.

    Nobody can predict it: in a shared folder another user could have put a link there.
    """
    return folder / f".labkit-{secrets.token_hex(8)}.part"


def is_unfinished(name: str) -> bool:
    """Whether this is the name of a checkpoint that is being written."""
    return bool(_UNFINISHED.fullmatch(name))


def probe(folder: Path) -> Path:
    """Make an empty unfinished checkpoint, for other machines to see; ``remove`` removes it."""
    path = hidden(folder)
    path.mkdir(parents=True)
    return path


def remove_unfinished(folder: str | Path | None) -> None:
    """Remove what runs that were interrupted have left, unless a run is writing there now.

    To be called when the ranks have ended, in whatever way: those that were killed while they
    wrote could not clean up. It never raises OSError; None for a run without checkpoints.
    """
    if folder is None:
        return
    path = Path(folder)
    with contextlib.suppress(OSError):
        if any(_UNFINISHED.fullmatch(name) for name in os.listdir(path)):
            lock = Lock(path)
            try:
                clean(path, lock)
            finally:
                lock.release()


def clean(folder: Path, lock: Lock) -> None:
    """Remove what interrupted runs have left; the caller holds the lock, so they have ended."""
    if not lock.works:
        return
    for name in os.listdir(folder):
        if _UNFINISHED.fullmatch(name):
            remove(folder / name)


def remove(path: Path) -> bool:
    """Remove a checkpoint, or a part of one, that a run of this user has written.

    A folder in which there is anything else is left as it is, and so is anything that is not a
    folder, but for a link with the name of an unfinished checkpoint.

    Returns:
        Whether it is removed.
    """
    try:
        found = path.lstat()
        if found.st_uid != os.geteuid():
            return False
        if stat.S_ISLNK(found.st_mode) and _UNFINISHED.fullmatch(path.name):
            path.unlink()
            return True
        if not stat.S_ISDIR(found.st_mode) or not holds_only_ours(path):
            return False
        if not _UNFINISHED.fullmatch(path.name):
            # Under its new name it no longer counts as a checkpoint, even if this is cut short.
            path = path.rename(hidden(path.parent))
        for file in list(path.iterdir()):
            file.unlink()
        path.rmdir()
    except OSError:
        return False
    return True


def holds_only_ours(path: Path) -> bool:
    """Whether all in this folder are plain files with the names of a checkpoint's files."""
    return all(
        _OURS.fullmatch(file.name) and stat.S_ISREG(file.lstat().st_mode)
        for file in list(path.iterdir())
    )


def publish(unfinished: Path, path: Path, *, replace: bool) -> None:
    """Rename a whole checkpoint to its own name.

    Args:
        unfinished: its hidden folder.
        path: its name.
        replace: whether what has that name was written by this run, and is to be removed. Anything
            else of that name, such as a damaged checkpoint, is kept as ``step-00000120.old-3f9c``.

    Raises:
        OSError: it cannot be renamed.
    """
    if not os.path.lexists(path):
        os.rename(unfinished, path)
    elif not replace:
        os.rename(path, path.with_name(f"{path.name}.old-{secrets.token_hex(2)}"))
        os.rename(unfinished, path)
    else:
        if not _exchange(unfinished, path):
            aside = hidden(path.parent)
            os.rename(path, aside)
            os.rename(unfinished, path)
            unfinished = aside
        remove(unfinished)
    sync(path.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Give each of two paths the other's name, in one step; False where the system cannot.

    Source: renameat2(2), RENAME_EXCHANGE.
    """
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = ctypes.c_int(-100), ctypes.c_uint(2)
    return renameat2(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0


def sync(folder: Path) -> None:
    """Write a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do this for a folder.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def mark_best(folder: Path, path: Path) -> None:
    """Let the link ``best`` lead to this checkpoint, in one step, so that there always is one."""
    best = folder / BEST
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISLNK(best.lstat().st_mode):
            raise OSError(errno.EEXIST, f"{best} is not a link that a run has made")
    link = hidden(folder)
    os.symlink(path.name, link)
    os.replace(link, best)
    sync(folder)


def best_name(folder: Path) -> str | None:
    """The name of the checkpoint that ``best`` leads to; None without one."""
    try:
        return os.readlink(folder / BEST)
    except OSError:
        return None
