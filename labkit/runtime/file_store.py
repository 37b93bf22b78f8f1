"""Where the ranks that one launcher starts find each other: a file in memory, and no socket.

PyTorch's TCPStore listens on every address of the machine, accepts what anybody sends, and looks
up callers' names. This one is a FileStore in a file that no folder lists: only processes of the
same user can open it, and it is gone with the last of them, however they end.
"""

import os
import tempfile
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch.distributed as dist


class MeetingFile:
    """The file below the store of one run's ranks; it travels to them as an open file.

    Without arguments it is a new file.
    """

    def __init__(self, descriptor: int | None = None, path: str | None = None):
        self._folder: tempfile.TemporaryDirectory | None = None
        if descriptor is None and path is None:
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create("labkit-store")
                os.fchmod(descriptor, 0o600)
            else:
                # Only Linux gives an open file a path.
                self._folder = tempfile.TemporaryDirectory(prefix="labkit-")
                path = str(Path(self._folder.name) / "store")
        self._descriptor, self._path = descriptor, path

    def __reduce__(self) -> tuple[Any, ...]:
        if self._descriptor is None:
            return MeetingFile, (None, self._path)
        return _from_duplicate, (DupFd(self._descriptor),)

    def store(self, world_size: int) -> dist.FileStore:
        """The store, as this rank opens it; call it once per rank."""
        return dist.FileStore(self._path or f"/proc/self/fd/{self._descriptor}", world_size)

    def close(self) -> None:
        """Close the file, in the launcher at the end of the run."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._folder:
            self._folder.cleanup()


def _from_duplicate(duplicate: Any) -> MeetingFile:
    return MeetingFile(duplicate.detach())
