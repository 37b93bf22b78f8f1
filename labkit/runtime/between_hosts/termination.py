"""SIGTERM waits for a moment: torchrun sends it to all ranks of its host once one has ended.

It looks ten times a second, and who has seen the end of its neighbour must be able to say so. The
default would end the process at once, and a handler in Python would wait for the main thread,
which may be inside a call for ever. So the signal is told to the watching thread, which ends the
process as the default would have done.

Source: Python's ``signal.set_wakeup_fd``.
"""

import contextlib
import ctypes
import os
import signal
import threading
from types import FrameType

_LIBC = ctypes.CDLL(None)


class Termination:
    """Lets a thread end this process on SIGTERM, unless the program handles that itself.

    Args:
        told: a descriptor, not blocking, that gets the number of each signal as a byte.
    """

    def __init__(self, told: int):
        self._is_on = False
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            return
        signal.signal(signal.SIGTERM, self._wait)
        self._is_on = True

    def _wait(self, number: int, frame: FrameType | None) -> None:
        """In the main thread: nothing, since the watching thread ends the process."""

    def is_meant(self, numbers: bytes) -> bool:
        """Whether these signals end the process: the program has set no handler meanwhile."""
        handler = signal.getsignal(signal.SIGTERM)
        return self._is_on and signal.SIGTERM in numbers and handler == self._wait

    def end(self) -> None:
        """End this process by SIGTERM."""
        self.let_go()
        os.kill(os.getpid(), signal.SIGTERM)

    def let_go(self) -> None:
        """Let SIGTERM end this process at once, from any thread."""
        if self._is_on:
            # Python lets only the main thread change a handler.
            _LIBC.signal(int(signal.SIGTERM), None)

    def close(self) -> None:
        """Restore the default, in the thread that has made this."""
        if self._is_on:
            self._is_on = False
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) == self._wait:
                with contextlib.suppress(ValueError):
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
