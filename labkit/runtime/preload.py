"""Import torch before the first run needs it, in the process that ranks are forked from."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from labkit.runtime.forkserver import start_method, start_server
from labkit.units import spelled

# What the forkserver imports before it forks ranks. The packages above the runtime append the
# modules that their ranks need: the runtime does not know these packages.
FOR_RANKS = ["labkit.runtime.preload_first", "labkit.runtime.worker", "labkit.collectives"]
# The first optimizer in a process imports torch._dynamo, which takes seconds in every rank.
FOR_TRAINING = ["torch._dynamo"]
# The module whose ``watcher`` draws the runs of a notebook; imported by the first of them.
IN_NOTEBOOKS: list[str] = []


def under_torchrun() -> bool:
    """Whether ``torchrun`` has started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


@spelled
def warm_up(*, training: bool = True) -> None:
    """Start the process that all ranks are forked from, in the background; return at once.

    The process needs some seconds to import torch. A notebook calls this function first, so that
    the process is ready when the reader gets to the first run; otherwise the first run starts it.

    Args:
        training: also import what training needs. Without these imports the first run starts
            sooner, but every rank that makes an optimizer spends seconds on them.
    """
    if under_torchrun() or start_method() != "forkserver":
        return
    more = FOR_TRAINING if training else ()
    start_server([*FOR_RANKS, *more, "labkit.runtime.preload_last"])


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
