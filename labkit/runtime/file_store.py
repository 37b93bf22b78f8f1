"""Where the ranks that one launcher starts find each other: a file in memory, and no socket.

PyTorch's TCPStore listens on all of a machine's addresses, takes what anybody sends, and asks a
name server who calls. This one is a FileStore in a file that no folder lists: only processes of
the same user can open it, and it is gone with the last of them, however they end.
"""

import os
import tempfile
from multiprocessing.reduction import DupFd
from pathlib import Path

import torch.distributed as dist


class MeetingFile:
    """The file below the store of one run's ranks; it travels to them as an open file."""

    def __init__(self, descriptor: int | None = None):
        self._folder: tempfile.TemporaryDirectory | None = None
        if descriptor is None and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("labkit-store")
            os.fchmod(descriptor, 0o600)
        elif descriptor is None:
            # Elsewhere than on Linux an open file has no path of its own.
            self._folder = tempfile.TemporaryDirectory(prefix="labkit-")
        self._descriptor = descriptor
        self._path = self._folder and str(Path(self._folder.name) / "store")

    def __reduce__(self):
        if self._descriptor is None:
            return _at_path, (self._path,)
        return _from_duplicate, (DupFd(self._descriptor),)

    def store(self, world_size: int) -> dist.FileStore:
        """This rank's way into the store; call it once a rank."""
        return dist.FileStore(self._path or f"/proc/self/fd/{self._descriptor}", world_size)

    def close(self) -> None:
        """In the launcher, at the end of the run."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._folder:
            self._folder.cleanup()


def _from_duplicate(duplicate) -> MeetingFile:
    return MeetingFile(duplicate.detach())


def _at_path(path: str) -> MeetingFile:
    meeting = MeetingFile.__new__(MeetingFile)
    meeting._descriptor, meeting._folder, meeting._path = None, None, path
    return meeting
