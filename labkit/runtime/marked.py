"""Processes that carry a mark in their environment, whatever session or parent they have."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def marked(name: str, mark: str) -> list[int]:
    """The living processes of this user whose environment began with ``name=mark`` (Linux)."""
    wanted, found = f"{name}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            # A process that has ended, and waits for its parent, has an empty environment.
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def kill_marked(name: str, mark: str, limit_s: float, reap: Callable[[], object]) -> None:
    """Kill every process with this mark, and those that they start meanwhile.

    ``reap`` is called in between, to take notice of children that have ended.
    """
    deadline_s = time.monotonic() + limit_s
    while (left := marked(name, mark)) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.05)
