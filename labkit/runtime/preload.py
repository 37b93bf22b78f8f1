"""The process that ranks are forked from: Python's forkserver, with torch imported already.

A rank starts from it in tenths of a second, and is still a fresh process, which a CUDA context of
the caller cannot break.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from labkit.comm.processes import signal_name
from labkit.config import parse_devices
from labkit.devices import plan, print_once
from labkit.gpus import may_exist

# What the forkserver imports before it forks ranks.
FOR_RANKS = ["labkit.runtime.server", "labkit.runtime.worker"]
# The first optimizer in a process imports torch._dynamo, which takes seconds in every rank.
FOR_TRAINING = ["torch._dynamo", "labkit.collectives"]
# The module whose ``watcher`` draws the runs of a notebook, imported by the first of them. A
# package above labkit appends it.
IN_NOTEBOOKS: list[str] = []

_server: Any = multiprocessing.forkserver._forkserver
_starting = threading.Lock()
_preloaded: set[str] = set()


def under_torchrun() -> bool:
    """Whether ``torchrun`` has started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def start_method() -> str:
    """``forkserver`` (0.1 s per start), or ``spawn`` where the system has no forkserver."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def warm_up(
    *,
    device: str | None = None,
    devices: str | Sequence[str] | None = None,
    world_size: int = 4,
    training: bool = True,
) -> None:
    """Start the process that all ranks are forked from, in the background; return at once.

    The process needs some seconds to import torch. A notebook calls this function first, so that
    the process is ready when the reader gets to the first run; otherwise the first run starts it.

    With ``device`` or ``devices`` it also says on stderr, once, what the later runs would: that
    ranks share a GPU, or why a GPU is not used. Where there are GPUs this takes some seconds.

    Args:
        device, devices: of the later runs, see ``labkit.run``.
        world_size: the most ranks of the later runs, to see whether they share GPUs.
        training: also import what training needs. Without these imports the first run starts
            sooner, but every rank that makes an optimizer spends seconds on them.

    Raises:
        ValueError: devices that this machine does not have.
    """
    if under_torchrun():
        return
    if start_method() == "forkserver":
        _start_server([*FOR_RANKS, *(FOR_TRAINING if training else ())])
    if devices is not None:
        print_once(plan(len(parse_devices(devices)), device or "auto", devices=devices).note)
    # Without a driver auto has nothing to say, and to import torch would take seconds.
    elif device and (device != "auto" or may_exist() or "torch" in sys.modules):
        print_once(plan(world_size, device).note)


def _start_server(preload: list[str]) -> None:
    """Start the forkserver, unless one runs that has imported ``preload``."""
    with _starting:
        pid = _server._forkserver_pid
        if pid and not {*preload} <= _preloaded and not multiprocessing.active_children():
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            os.unlink(_server._forkserver_address)
        multiprocessing.forkserver.set_forkserver_preload(preload)
        # Ctrl-C and the stop button signal the whole process group, and would end a server that
        # still imports. It inherits this thread's signal mask; the resource tracker unblocks the
        # signal when it starts, so it has to be there before.
        multiprocessing.resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if _server._forkserver_pid != pid:
            _preloaded.clear()
            _preloaded.update(preload)


def server_fault() -> str:
    """How the forkserver has ended; empty while it runs."""
    if (pid := _server._forkserver_pid) is None:
        return ""
    # WNOWAIT leaves the exit status to Python, which asks for it before the next run.
    with contextlib.suppress(ChildProcessError):
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return ""
        how = f"exit code {end.si_status}"
        if end.si_code != os.CLD_EXITED:
            how = signal_name(end.si_status)
        return (
            f"the process that ranks are forked from (the forkserver, pid {pid}) has ended: {how}"
        )
    return f"the process that ranks are forked from (the forkserver, pid {pid}) has ended"


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Delay Ctrl-C and the stop button until the end of the block.

    PyTorch cannot be imported again in a process where an interrupt has cut its import short.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held and callable(handler):
        handler(*held[-1])
