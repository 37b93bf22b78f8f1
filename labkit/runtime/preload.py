"""The process that ranks are forked from, with torch imported already (Python's forkserver).

A rank starts from it in tenths of a second, and is a fresh process all the same, which a CUDA
context of the caller's cannot break. This module is the one that knows the server's private names.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.forkserver import _forkserver

from labkit.comm.processes import is_running, is_stopped, signal_name

# What the forkserver has imported before it forks ranks: the runtime's own part of a rank. Rooms
# above add what their ranks need; this one knows none of them.
FOR_RANKS = ["labkit.runtime.preload_first", "labkit.runtime.worker"]
# An optimizer imports torch._dynamo when the first one is made: seconds in every rank.
FOR_TRAINING = ["torch._dynamo"]
# Ctrl-Z stops the server and its caller, and fg lets them go on one after the other.
_STOPPED_PATIENCE_S = 1.0
# A local socket's path has 107 characters at most, and Python adds some 30 to the folder's.
_LONGEST_FOLDER = 70
_SHORT_FOLDER = "/tmp"


def under_torchrun() -> bool:
    """Whether ``torchrun`` has started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def warm_up(*, training: bool = True) -> None:
    """Start the process that all ranks are forked from, in the background; returns at once.

    It imports torch (some seconds). A notebook calls this first, so that it is ready when the
    reader comes to the first run; a run starts it by itself otherwise.

    Args:
        training: import what training needs too. Without it the first run comes sooner, and every
            rank that makes an optimizer takes seconds for it.
    """
    if under_torchrun() or start_method() != "forkserver":
        return
    end_stopped_server()
    _open_standard_files()
    _make_short_folder()
    more = FOR_TRAINING if training else ()
    multiprocessing.forkserver.set_forkserver_preload(
        [*FOR_RANKS, *more, "labkit.runtime.preload_last"]
    )
    # Ctrl-C and the stop button signal the whole process group; the server would die of it while
    # it imports. It inherits the mask of the thread that starts it.
    # (The resource tracker unblocks the signal when it starts: it has to be there before.)
    multiprocessing.resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # OpenMP's threads spin while they wait. With another program on the cores, the spinning takes
    # more time than the work: a rank of two threads was seen to slow down tenfold.
    chosen = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = chosen or "passive"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if chosen is None:
            del os.environ["OMP_WAIT_POLICY"]


def start_method() -> str:
    """``forkserver`` with torch preloaded (0.1 s a start); ``spawn`` where the system has none."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    return "forkserver"


def server_fault() -> str:
    """Why the server can neither start ranks nor tell how they end; empty when it can."""
    pid = _forkserver._forkserver_pid
    if pid is None:
        return ""
    name = f"the process that ranks are forked from (the forkserver, pid {pid})"
    if is_stopped(pid):
        return f"{name} is stopped by a signal"
    try:
        # Without waiting for it: Python's own look, before the next run, must find it too.
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return f"{name} has ended"
    if end is None:
        return ""
    if end.si_code == os.CLD_EXITED:
        return f"{name} has ended with exit code {end.si_status}"
    return f"{name} was killed by {signal_name(end.si_status)}"


def _open_standard_files() -> None:
    """Fill 0 to 2 where they are closed (a service): a rank's pipe must not come to lie there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is the one that is closed.
            os.open(os.devnull, os.O_RDWR)


def _make_short_folder() -> None:
    """Where the temporary folder's path is too long for a socket in it, take another for that."""
    config = multiprocessing.current_process()._config
    if "tempdir" in config or len(tempfile.gettempdir()) <= _LONGEST_FOLDER:
        return
    chosen, tempfile.tempdir = tempfile.tempdir, _SHORT_FOLDER
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = chosen


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Hold Ctrl-C and the stop button back until the end of the block.

    PyTorch cannot be imported again in a process where its import was broken off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple] = []
    handler = signal.signal(signal.SIGINT, lambda *interrupt: came.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came and callable(handler):
        handler(*came[-1])


@atexit.register
def end_stopped_server() -> None:
    """End a server that a signal has stopped, so that nothing waits for it; it is started anew.

    It would start no rank, report the end of none, and stay when this process ends.
    """
    pid = _forkserver._forkserver_pid
    if pid is None or _comes_true(lambda: not is_stopped(pid)):
        return
    os.kill(pid, signal.SIGKILL)
    # Python takes a server for a living one until the system has seen it end.
    _comes_true(lambda: not is_running(pid))


def _comes_true(condition: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + _STOPPED_PATIENCE_S
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def _forget_server() -> None:
    """In a forked child: the server, and the folder of its socket, are the parent's."""
    _forkserver.__init__()
    multiprocessing.current_process()._config.pop("tempdir", None)


os.register_at_fork(after_in_child=_forget_server)
