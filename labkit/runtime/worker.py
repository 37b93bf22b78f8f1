"""The process of a rank, from start to end: connect, call the function, report the result."""

import builtins
import contextlib
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from labkit import gpus
from labkit.comm.board import RETURNED, RUNNING
from labkit.comm.comm import Comm
from labkit.comm.emulated_link import EmulatedLink
from labkit.comm.shared_memory import Arena
from labkit.comm.source_lines import install_sources
from labkit.devices import Plan
from labkit.runtime.connect import MeetingFile, connect
from labkit.runtime.failures import report_of_failure
from labkit.runtime.messages import Report, send
from labkit.runtime.pickling import dump_value
from labkit.runtime.prepare import seed_random_numbers
from labkit.runtime.shortages import result_too_large

# What the launcher writes to let a rank exit.
GO = b"g"


@dataclass(frozen=True)
class Job:
    """What the launcher hands to every rank.

    Attributes:
        call: the function with its arguments, see ``pickling.dump_call``.
        sources: the caller's notebook cells, for tracebacks.
        plan: the devices, backend and transport of the ranks.
        world_size: the number of ranks, P.
        timeout_s: the run's deadline.
        may_lose: ranks that the run can do without.
        link: the emulated link of each rank; None for no emulation.
    """

    call: bytes
    sources: dict[str, list[str]]
    plan: Plan
    world_size: int
    timeout_s: float
    may_lose: frozenset[int] = frozenset()
    link: EmulatedLink | None = None


def run_rank(
    rank: int,
    environment: dict[str, str],
    control: Connection,
    output: Connection,
    job: Job,
    arena: Arena,
    meeting: MeetingFile,
) -> None:
    """The body of a rank's process.

    ``control`` carries its report and the launcher's answer, ``output`` its stdout and stderr.
    """
    os.environ.clear()
    os.environ.update(environment)
    # A separate process group, so that processes which this rank starts can be ended with it.
    os.setpgid(0, 0)
    me = os.getpid()
    may_exit = _watch_launcher(control)
    # Ctrl-C and the stop button signal the whole process group; the launcher ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _capture_output(output)
    arena.board.ranks[rank]["pid"] = me
    if sys.platform.startswith("linux"):
        # A DataLoader's workers are forks of this rank, as in any program on Linux. From the
        # forkserver they would have to unpickle the data set, and to import torch, each epoch.
        multiprocessing.set_start_method("fork", force=True)
    # A rank has no notebook that shows objects and figures: it prints their text.
    vars(builtins)["display"] = print
    os.environ["MPLBACKEND"] = "agg"
    try:
        report = _call(job, rank, arena, meeting)
        arena.board.ranks[rank]["state"] = RETURNED
    except BaseException as error:
        report = report_of_failure(rank, error)
    _flush()
    if os.getpid() != me:
        # A child that the function has forked gets here, too; only the rank itself reports.
        os._exit(0)
    try:
        send(control, report)
    except MemoryError:
        error = MemoryError(result_too_large(len(report.payload)))
        send(control, report := report_of_failure(rank, error))
    if report.kind != "value" and rank in job.may_lose:
        # The other ranks notice that this one has ended, and continue.
        os._exit(1)
    # Exiting now would break the connections of ranks that are still running, and after a failure
    # their errors would hide its cause. The launcher lets this process exit, or kills it.
    may_exit.wait()


def _call(job: Job, rank: int, arena: Arena, meeting: MeetingFile) -> Report:
    install_sources(job.sources)
    function, args = cloudpickle.loads(job.call)
    comm = connect(job.plan, job.timeout_s, arena, meeting, job.link)
    arena.board.ranks[rank]["state"] = RUNNING
    seed_random_numbers(rank)
    comm.session.start_together()
    started_s = time.perf_counter()
    value = function(comm, *args)
    gpus.synchronize(comm.device)
    return success(comm, value, time.perf_counter() - started_s)


def success(
    comm: Comm, value: Any, duration_s: float, dump: Callable[[Any], bytes] = dump_value
) -> Report:
    """Close the Comm of a rank whose function has returned ``value``, and return its report."""
    meter = comm.session.memory
    peak_memory = meter.total() if meter else None
    payload = dump(value)
    comm.session.close()
    return Report(
        comm.rank,
        "value",
        payload,
        spans=tuple(comm.session.spans()),
        messages=comm.messages,
        bytes_sent=comm.bytes_sent,
        device=_device_name(comm),
        peak_memory=peak_memory,
        duration_s=duration_s,
    )


def _device_name(comm: Comm) -> str:
    """The rank's device, with its machine if there are several: each of them has a ``cuda:0``."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", comm.world_size))
    where = f" of machine {os.environ['GROUP_RANK']}" if ranks_here < comm.world_size else ""
    return f"{comm.device}{where}"


def _watch_launcher(control: Connection) -> threading.Event:
    """Watch the launcher in a thread; return an event that is set once this rank may exit.

    A launcher that is killed (SIGKILL) cannot end its ranks. So the thread waits until the
    launcher's pipe or process has ended (a child that the launcher has forked may hold the pipe
    open), and then kills this rank's process group.
    """
    may_exit = threading.Event()
    parent = parent_process()
    assert parent is not None
    launcher = parent.sentinel

    def watch() -> None:
        with contextlib.suppress(OSError):
            if control in wait([control, launcher]) and os.read(control.fileno(), 1) == GO:
                may_exit.set()
                wait([launcher])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="labkit-launcher-watch", daemon=True).start()
    return may_exit


def _capture_output(output: Connection) -> None:
    """Send everything written to file descriptors 1 and 2, by Python or C, to the launcher."""
    _flush()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = os.fdopen(descriptor, "wb", buffering=0, closefd=False)
        text = io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True)
        setattr(sys, stream, text)
    # A C-level handler: it answers even while the main thread is stuck in a native call.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)


def _flush() -> None:
    # The function may have replaced a stream by an object that cannot be flushed.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
