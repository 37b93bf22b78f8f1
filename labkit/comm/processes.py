"""What the operating system says about a process that is not our child."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_ENDED = "ZX"


def is_running(pid: int) -> bool:
    """Whether a process is alive; a zombie (ended, not yet waited for) is not."""
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state not in _ENDED
        # Without /proc, the only simple check is whether the process exists.
        os.kill(pid, 0)
        return True
    return False


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 40`` for one without a name (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kill_marked(name: str, mark: str, limit_s: float, reap: Callable[[], object]) -> None:
    """Kill this user's processes whose environment began with ``name=mark`` (Linux).

    ``reap`` is called until none is left, to take notice of children that have ended.
    """
    deadline_s = time.monotonic() + limit_s
    while (left := marked(name, mark)) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.05)


def marked(name: str, mark: str) -> list[int]:
    """The living processes that ``kill_marked`` kills."""
    wanted, found = f"{name}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # A process that has ended, and waits for its parent, has an empty environment.
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def loopback() -> str:
    """The name of the network interface that only processes of this machine can reach."""
    return "lo0" if sys.platform == "darwin" else "lo"
