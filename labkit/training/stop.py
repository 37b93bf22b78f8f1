"""SIGTERM: the ranks end together after a step, with a checkpoint.

torchrun passes the signal on to its ranks (when Slurm's time is over, or a machine joins). Our own
launcher leaves a file for them. Each rank brings what it has heard to the all-reduce of a flag
after every step.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from labkit.runtime.preload import under_torchrun

STATUS = 128 + signal.SIGTERM
_FILE = ".labkit-stop"
# A step may be long. A rank whose peers are gone never comes to the end of one.
_PATIENCE_S = 25.0


class Stop:
    """On a rank, as a context manager while it trains: whether it ``is_told`` to end.

    Args:
        folder: of the checkpoints; without one, SIGTERM ends the process as ever.
    """

    def __init__(self, folder: str | None):
        self._file = Path(folder or "", _FILE)
        in_main = threading.current_thread() is threading.main_thread()
        self._listens = folder is not None and in_main
        self._has_heard = False
        self._ended = threading.Event()

    @property
    def is_told(self) -> bool:
        return self._has_heard or self._file.exists()

    def __enter__(self) -> "Stop":
        if self._listens:
            # Python's own handler runs between two lines, and this rank may be in a long wait.
            self._here, self._there = socket.socketpair()
            self._there.setblocking(False)
            self._before = signal.signal(signal.SIGTERM, lambda *_: None)
            self._fd_before = signal.set_wakeup_fd(self._there.fileno())
            threading.Thread(target=self._listen, name="labkit-stop", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._listens:
            signal.set_wakeup_fd(self._fd_before)
            signal.signal(signal.SIGTERM, self._before)
            self._there.close()

    def _listen(self) -> None:
        with self._here:
            while received := self._here.recv(64):
                if signal.SIGTERM in received:
                    self._has_heard = True
                    if not self._ended.wait(_PATIENCE_S):
                        os._exit(STATUS)


@contextlib.contextmanager
def sigterm_ends_ranks(folder: str | None) -> Iterator[None]:
    """In the launcher: the first SIGTERM lets the ranks end, the second one ends this process."""
    in_main = threading.current_thread() is threading.main_thread()
    if folder is None or under_torchrun() or not in_main:
        yield
        return
    file = Path(folder, _FILE)

    def leave_word(*_: object) -> None:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    file.unlink(missing_ok=True)
    before = signal.signal(signal.SIGTERM, leave_word)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        file.unlink(missing_ok=True)
