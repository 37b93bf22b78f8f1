"""The process that ranks are forked from: Python's forkserver, with torch imported already.

A rank starts from it in tenths of a second, and is still a fresh process, which a CUDA context of
the caller cannot break. Only this module and ``preload_last`` use the server's private names.
"""

import atexit
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from labkit.comm.processes import is_running, is_stopped, signal_name
from labkit.runtime.variables import variables_now

_server: Any = multiprocessing.forkserver._forkserver
# How long a stopped server may take to continue: after Ctrl-Z, fg continues the caller and the
# server one after the other.
_STOPPED_PATIENCE_S = 1.0
# The path of a Unix socket has at most 107 characters, of which Python's file names take some 30.
_LONGEST_FOLDER = 70
_SHORT_FOLDER = "/tmp"

# Variables that Python, the C library or a library of torch reads once, when it is loaded.
_READ_AT_LOAD = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_")
_READ_AT_LOAD += ("PYTHON", "LD_", "DYLD_", "MALLOC_", "GLIBC_", "TORCH_LOGS", "TORCHDYNAMO_")
# Python reads it at each breakpoint(), and Ray sets it in a process that it connects.
_READ_AT_USE = {"PYTHONBREAKPOINT"}
# A module that asks for GPUs while the server imports it must not initialise CUDA, which no fork
# of the server could use afterwards: with this variable PyTorch asks NVML, the driver's monitor.
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
# labkit sets these for the server alone, unless the caller has set them. OpenMP's threads spin
# while they wait. With another program on the cores, the spinning takes more time than the work: a
# rank with two threads was ten times slower in a measurement.
_OF_SERVER = {"OMP_WAIT_POLICY": "passive", _ASK_NVML: "1"}
# The variables of this process when it started the server.
_variables_at_start: dict[str, str] = {}
_told: set[tuple[str, str | None]] = set()
_starting = threading.RLock()


def start_method() -> str:
    """``forkserver`` (0.1 s per start), or ``spawn`` where the system has no forkserver."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def start_server(preload: list[str]) -> None:
    """Start the server if it is not running; it imports ``preload`` in the background.

    Args:
        preload: names of modules, in the order in which to import them.
    """
    # Two threads may start runs at the same time; the variables below are those of the process.
    with _starting:
        _start_server(preload)


def _start_server(preload: list[str]) -> None:
    end_stopped_server()
    _open_standard_files()
    _make_short_folder()
    multiprocessing.forkserver.set_forkserver_preload(preload)
    global _variables_at_start
    # Ctrl-C and the stop button signal the whole process group, which would kill a server that is
    # still importing. The server inherits the signal mask of the thread that starts it.
    # (The resource tracker unblocks the signal when it starts, so it has to be started first.)
    multiprocessing.resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid, variables = _server._forkserver_pid, variables_now()
    added = {name: value for name, value in _OF_SERVER.items() if not variables.get(name)}
    os.environ.update(added)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name in added:
            del os.environ[name]
            os.environ.update({name: ""} if name in variables else {})
    if _server._forkserver_pid != pid:
        _variables_at_start = variables
        _told.clear()


def removed_variables() -> set[str]:
    """The variables that the server has, and that its ranks must not have."""
    return {*_variables_at_start, _ASK_NVML} - os.environ.keys()


def late_variables() -> str:
    """Which variables were set too late for the ranks' libraries; each change is told once."""
    before, now = _variables_at_start, variables_now()
    if not before:
        return ""
    changed = {name for name in {*before, *now} if before.get(name) != now.get(name)}
    changed -= _READ_AT_USE
    late = {(name, now.get(name)) for name in changed if name.startswith(_READ_AT_LOAD)}
    names = sorted(name for name, _ in late - _told)
    _told.update(late)
    if not names:
        return ""
    verb = "has" if len(names) == 1 else "have"
    return (
        f"{', '.join(names)} {verb} changed since labkit.warm_up() or the first run: it is in the "
        "ranks' os.environ, but the libraries that read it were loaded before. Next step: restart "
        "the kernel and set it in the first cell, before labkit.warm_up(). (For the number of "
        "threads, call torch.set_num_threads in the function of the ranks.)"
    )


def server_fault() -> str:
    """Why the server can neither start ranks nor report how they end; empty if it works."""
    pid = _server._forkserver_pid
    if pid is None:
        return ""
    name = f"the process that ranks are forked from (the forkserver, pid {pid})"
    if is_stopped(pid):
        return f"{name} is stopped by a signal"
    try:
        # WNOWAIT leaves the exit status to Python, which asks for it before the next run.
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return f"{name} has ended"
    if end is None:
        return ""
    if end.si_code == os.CLD_EXITED:
        return f"{name} has ended with exit code {end.si_status}"
    return f"{name} was killed by {signal_name(end.si_status)}"


@atexit.register
def end_stopped_server() -> None:
    """Kill a server that a signal has stopped, so that nothing waits for it.

    A stopped server would start no ranks, would not report that ranks have ended, and would
    outlive this process. The next run starts a new server.
    """
    pid = _server._forkserver_pid
    if pid is None or _comes_true(lambda: not is_stopped(pid)):
        return
    os.kill(pid, signal.SIGKILL)
    # Python starts a new server only after the system has reported the end of the old one.
    _comes_true(lambda: not is_running(pid))


def _comes_true(condition: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + _STOPPED_PATIENCE_S
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def _open_standard_files() -> None:
    """Open descriptors 0 to 2 if they are closed (in a service): no pipe may get these numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is the closed one. The server and its ranks inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _make_short_folder() -> None:
    """Put Python's sockets elsewhere if the temporary folder's path is too long for them."""
    if "tempdir" in _process_config() or len(tempfile.gettempdir()) <= _LONGEST_FOLDER:
        return
    chosen, tempfile.tempdir = tempfile.tempdir, _SHORT_FOLDER
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = chosen


def _process_config() -> dict[str, Any]:
    process: Any = multiprocessing.current_process()
    return process._config


def _forget_server() -> None:
    """Make a forked child forget the server and its socket's folder, which are the parent's."""
    global _starting
    _server.__init__()
    # Another thread of the parent may have held it.
    _starting = threading.RLock()
    _process_config().pop("tempdir", None)


os.register_at_fork(after_in_child=_forget_server)
