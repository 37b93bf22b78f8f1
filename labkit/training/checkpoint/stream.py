"""Files that are hashed while they are written, at a pace that leaves the cores to training.

The writing thread shares the cores and Python's interpreter lock with the training. Whatever it
has computed for a moment, it then rests for many times as long, unless somebody waits for it.
"""

import hashlib
import io
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

# The part of its time in which the writing thread may compute.
SHARE = 1 / 30
_CHUNK_BYTES = 1 << 20
# Shorter rests are saved up: the system's clock would make them longer.
_LEAST_REST_S = 0.001


class StoppedError(Exception):
    """The run has failed or was interrupted, and its writing is not to go on."""


class Pace:
    """When the writing thread rests.

    Attributes:
        hurry: set while somebody waits for the writing; then it never rests.
        stopped: set when the writing is not to go on.
    """

    def __init__(self, share: float = SHARE):
        self.hurry, self.stopped = threading.Event(), False
        self._share = share
        self._computed_s = 0.0

    def begin(self) -> None:
        """Begin a writing, on the thread that computes."""
        self._computed_s = time.thread_time()

    def rest(self) -> None:
        """Rest, in proportion to what this thread has computed since it last did.

        Raises:
            StoppedError: the writing is not to go on.
        """
        if self.stopped:
            raise StoppedError
        rest_s = (time.thread_time() - self._computed_s) * (1 / self._share - 1)
        if rest_s > _LEAST_REST_S:
            self.hurry.wait(rest_s)
            self._computed_s = time.thread_time()


class HashedFile(io.BufferedWriter):
    """A new file, whose SHA-256 is known when it has been written.

    Attributes:
        digest: of what was written so far.
        error: why it could not be written.
    """

    def __init__(self, path: str | os.PathLike, pace: Pace):
        # Never a file or a link that is there already.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        super().__init__(io.FileIO(os.open(path, flags, 0o666), "wb"), _CHUNK_BYTES)
        self.digest = hashlib.sha256()
        self.error: OSError | StoppedError | None = None
        self._pace = pace

    def write(self, data: Any) -> int:
        whole = memoryview(data).cast("B")
        try:
            for start in range(0, len(whole), _CHUNK_BYTES):
                part = whole[start : start + _CHUNK_BYTES]
                self.digest.update(part)
                super().write(part)
                self._pace.rest()
        except (OSError, StoppedError) as error:
            self.error = error
            raise
        return len(whole)

    def sync(self) -> None:
        """Write all to the disk itself."""
        self.flush()
        os.fsync(self.fileno())


class HashedFiles(FileSystem):
    """What torch.distributed.checkpoint writes through; remembers each file's size and SHA-256.

    Attributes:
        files: by name, ``bytes`` and ``sha256`` of the files that are complete.
        error: why a file could not be written, or that it was not to go on.
    """

    def __init__(self, pace: Pace):
        self.files: dict[str, dict[str, Any]] = {}
        self.error: OSError | StoppedError | None = None
        self._pace = pace

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "wb", "it only writes"
        with HashedFile(path, self._pace) as file:
            try:
                yield file
            finally:
                self.error = file.error
        told = {"bytes": os.stat(path).st_size, "sha256": file.digest.hexdigest()}
        self.files[Path(path).name] = told

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)
