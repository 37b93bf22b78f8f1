"""The process that ranks are forked from: Python's forkserver, with torch imported already."""

import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from labkit.devices import plan, print_once
from labkit.gpus import may_exist

# What the forkserver imports before it forks ranks.
FOR_RANKS = ["labkit.runtime.server", "labkit.runtime.worker", "labkit.collectives"]
# The first optimizer in a process imports torch._dynamo, which takes seconds in every rank.
FOR_TRAINING = ["torch._dynamo"]
# The module whose ``watcher`` draws the runs of a notebook, imported by the first of them. A
# package above labkit appends it.
IN_NOTEBOOKS: list[str] = []


def under_torchrun() -> bool:
    """Whether ``torchrun`` has started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def kernel() -> Any:
    """The IPython shell of a notebook's kernel, or None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if hasattr(shell, "kernel") else None


def warm_up(*, device: str | None = None, world_size: int = 4, training: bool = True) -> None:
    """Start the process that all ranks are forked from, in the background; return at once.

    It needs some seconds to import torch; otherwise the first run starts it. With ``device`` this
    also says on stderr what a run of ``world_size`` ranks would, which later ones do not repeat:
    that ranks share a GPU, for example (ValueError for a device that is not there). Only a
    first call may import what ``training`` needs; otherwise every rank spends seconds on it.
    """
    if under_torchrun():
        return
    # Imported modules are no garbage; to look for some takes a fifth of the time of the imports.
    gc.set_threshold(50_000)
    names = [*FOR_RANKS, *(FOR_TRAINING if training else ())]
    multiprocessing.forkserver.set_forkserver_preload(names)
    # Ctrl-C and the stop button signal the whole process group, and would end a server that still
    # imports. It inherits this thread's signal mask; the resource tracker unblocks the signal when
    # it starts, so it has to be there before.
    with interrupts_later():
        multiprocessing.resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if (shell := kernel()) is not None:
        shell.observe(_end, "exit_now")
    # Without a driver auto has nothing to say, and to import torch would take seconds.
    if device and (device != "auto" or may_exist()):
        print_once(plan(world_size, device).note)


def _end(_change: object) -> None:
    """End what a kernel that ends would wait for in vain: the tracker ignores its signals."""
    of: Any = multiprocessing
    of.util._exit_function()
    os.close(of.forkserver._forkserver._forkserver_alive_fd)
    of.resource_tracker._resource_tracker._stop()
    # To free what was imported takes a second. Triton would list what is never freed.
    gc.freeze()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


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
