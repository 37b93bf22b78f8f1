"""Import torch before the first run needs it, in the process that ranks are forked from."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from labkit.config import parse_devices
from labkit.devices import plan, tell_once
from labkit.gpus import may_exist
from labkit.runtime.forkserver import start_method, start_server
from labkit.units import spelled

# What the forkserver imports before it forks ranks. The packages above the runtime append the
# modules that their ranks need: the runtime does not know these packages.
FOR_RANKS = ["labkit.runtime.preload_first", "labkit.runtime.worker", "labkit.collectives"]
# The first optimizer in a process imports torch._dynamo, which takes seconds in every rank.
FOR_TRAINING = ["torch._dynamo"]
# The module whose ``watcher`` draws the runs of a notebook, imported by the first of them. A
# package above labkit appends it.
IN_NOTEBOOKS: list[str] = []


def under_torchrun() -> bool:
    """Whether ``torchrun`` has started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


@spelled
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
        more = FOR_TRAINING if training else ()
        start_server([*FOR_RANKS, *more, "labkit.runtime.preload_last"])
    if devices is not None:
        tell_once(plan(len(parse_devices(devices)), device or "auto", devices=devices).notes)
    # Without a driver auto has nothing to say, and to import torch would take seconds.
    elif device and (device != "auto" or may_exist() or "torch" in sys.modules):
        tell_once(plan(world_size, device).notes)


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
