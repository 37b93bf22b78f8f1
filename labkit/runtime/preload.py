"""What is imported before the first run needs it, and in which process."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from labkit.runtime.forkserver import start_method, start_server

# What the forkserver imports before it forks ranks: the runtime's own part of a rank. Rooms above
# add what their ranks need; this one knows none of them.
FOR_RANKS = ["labkit.runtime.preload_first", "labkit.runtime.worker", "labkit.collectives"]
# The first optimizer of a process imports torch._dynamo: seconds in every rank.
FOR_TRAINING = ["torch._dynamo"]


def under_torchrun() -> bool:
    """Whether ``torchrun`` has started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def warm_up(*, training: bool = True) -> None:
    """Start the process that all ranks are forked from, in the background; returns at once.

    It imports torch (some seconds). A notebook calls this first, so that it is ready when the
    reader gets to the first run; otherwise the first run starts it.

    Args:
        training: import what training needs, too. Without it the first run starts sooner, and
            every rank that makes an optimizer takes seconds for it.
    """
    if under_torchrun() or start_method() != "forkserver":
        return
    more = FOR_TRAINING if training else ()
    start_server([*FOR_RANKS, *more, "labkit.runtime.preload_last"])


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Hold Ctrl-C and the stop button back until the end of the block.

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
