"""Limits on a learner's function: seconds, and bytes of memory."""

import contextlib
import ctypes
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

# What a function may take on top of what its process holds; then it gets a MemoryError.
_MOST_BYTES = 2**30
# A function may catch the first OutOfTime, but hardly all.
_AGAIN_S = 0.2


class OutOfTime(BaseException):
    """Raised in a function that has not ended in time. No Exception, which it might catch."""


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise ``OutOfTime`` in the block once ``seconds`` have passed.

    A block in the main thread is ended in a call of ``time.sleep``, too; in another thread only
    between two lines of Python.
    """
    in_main = threading.current_thread() is threading.main_thread()
    with _alarm(seconds) if in_main else _watchdog(seconds):
        yield


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _watchdog(seconds: float) -> Iterator[None]:
    thread, done = ctypes.c_ulong(threading.get_ident()), threading.Event()

    def watch() -> None:
        wait_s = seconds
        while not done.wait(wait_s):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OutOfTime))
            wait_s = _AGAIN_S

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        # One that was raised too late must not reach what comes next.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """In a rank: an endless list ends in a MemoryError, and not the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    # Linux tells how much the process holds; other systems do not.
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
