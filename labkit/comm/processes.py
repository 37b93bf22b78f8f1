"""What the system says of a process that is not ours to wait for."""

import contextlib
import os
import signal
from pathlib import Path

_PROCESSES = Path("/proc")
_ENDED = "ZX"
# T: by SIGSTOP, SIGTSTP (Ctrl-Z) or a terminal; t: by a debugger.
_STOPPED = "Tt"


def is_running(pid: int) -> bool:
    """Whether a process lives; one that nobody has waited for yet (a zombie) does not."""
    return _state(pid) not in _ENDED


def is_stopped(pid: int) -> bool:
    """Whether a process is suspended by a signal: it does nothing until SIGCONT or its end."""
    return _state(pid) in _STOPPED


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; a real-time signal has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kill_group(leader: int) -> None:
    """Kill a process and whatever it has started, as far as that stayed in its group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


def _state(pid: int) -> str:
    """The letter in ``/proc/PID/stat``; X where there is no such process."""
    if not _PROCESSES.is_dir():
        # Elsewhere than on Linux only whether it is there can be asked so simply.
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "X"
        return "R"
    try:
        return (_PROCESSES / f"{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
