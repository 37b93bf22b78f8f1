"""``labkit.run``: a function on P real processes.

The engine is PyTorch's elastic agent (``labkit.runtime.agent``), a rank is
``labkit.runtime.worker``, and around them stands a supervisor (``labkit.runtime.supervisor``) that
ends every run whole.
"""

import multiprocessing
import os
import pickle
import resource
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from labkit.comm.source_lines import cell_sources
from labkit.devices import check_world_size, plan
from labkit.errors import WorkerError
from labkit.runtime.messages import Report, described
from labkit.runtime.preload import interrupts_later, under_torchrun, warm_up
from labkit.runtime.supervisor import Supervisor
from labkit.trace import Trace
from labkit.units import MOST_SECONDS, check_above_zero, check_integer

__all__ = ["RunResult", "run", "under_torchrun", "warm_up"]

# Of each rank: both ends of two pipes, and what tells how its process ends.
_OPEN_FILES_PER_RANK = 6
# Of Python, a notebook's kernel and the learner's own.
_OPEN_FILES = 100


@dataclass(frozen=True)
class RunResult:
    """What a run gave.

    Attributes:
        values: what ``fn`` returned, by rank.
        trace: the spans of all ranks.
        duration_s: the longest time that ``fn`` took on a rank, launch not counted.
        messages: messages sent, by rank.
        bytes_sent: payload bytes sent, by rank.
        lost: of the ranks in ``may_lose``, those that ended early, and why. Their value is None,
            and what they sent and did is not counted.
    """

    values: list[Any]
    trace: Trace = field(repr=False)
    duration_s: float
    messages: list[int]
    bytes_sent: list[int]
    lost: dict[int, str] = field(default_factory=dict)


def run(
    fn: Callable,
    *args: Any,
    world_size: int,
    device: str = "auto",
    transport: str = "auto",
    timeout_s: float = 120,
    may_lose: Collection[int] = (),
) -> RunResult:
    """Call ``fn(comm, *args)`` on ``world_size`` processes, and gather what they return.

    Args:
        fn: a function of a ``Comm`` and ``args``; one defined in a notebook cell is welcome.
        args: further arguments, the same on every rank.
        world_size: P, the number of ranks.
        device: ``auto`` (GPUs where there are any), ``cpu`` or ``cuda``.
        transport: how the bytes travel. ``shared``: through memory that the ranks of one machine
            share; ``gloo``: PyTorch's point-to-point; ``auto``: shared memory for CPU ranks,
            where the system has it.
        timeout_s: the whole run's deadline, counted from the start of the ranks.
        may_lose: ranks that the run can do without: one that raises, is killed or leaves early,
            once all have started, ends nobody else. Ranks that wait for it get a PeerLostError.
            ``torchrun`` knows no such ranks: there it ends all when one fails, whatever this says.

    Raises:
        ValueError: an impossible world size, device, transport or timeout; ``fn`` or ``args``
            that cannot travel; a run inside a run.
        WorkerError: a rank raised, was killed, or left early.
        DeadlockError: the ranks can never finish; the message says why.
        DeadlineError: the deadline passed; the message holds each rank's stack.

    Under ``torchrun`` the ranks exist already: then this process is one of them.
    """
    with interrupts_later():
        from labkit.runtime import worker

    if worker.inside_a_run or multiprocessing.parent_process() is not None:
        raise ValueError(
            "labkit.run was called inside a rank of another run: start runs from the notebook or "
            'the script. In a script, keep the call under if __name__ == "__main__":'
        )
    check_world_size(world_size)
    for rank in may_lose:
        check_integer("a rank in may_lose", rank, least=0)
    if not set(may_lose) <= set(range(world_size)):
        raise ValueError(
            f"may_lose {sorted(may_lose)}: with world_size {world_size} the ranks are 0 to "
            f"{world_size - 1}"
        )
    check_above_zero("timeout_s", timeout_s, MOST_SECONDS)
    if under_torchrun():
        reports = worker.run_here(fn, args, world_size, device, transport, timeout_s)
        lost = {}
    else:
        placement = plan(world_size, device, transport)
        if placement.note:
            print(placement.note, file=sys.stderr)
        _check_program()
        _check_open_files(world_size)
        losable = frozenset(may_lose)
        job = worker.Job(_pack(fn, args), cell_sources(), placement, timeout_s, losable)
        supervisor = Supervisor(job, world_size, timeout_s, losable)
        reports, lost = supervisor.run(), supervisor.lost
    return RunResult(
        values=[report and _loaded(report) for report in reports],
        trace=Trace.merge(report.spans for report in reports if report),
        duration_s=max((report.duration_s for report in reports if report), default=0.0),
        messages=[report.messages if report else 0 for report in reports],
        bytes_sent=[report.bytes_sent if report else 0 for report in reports],
        lost=lost,
    )


def _loaded(report: Report) -> Any:
    """What a rank returned. (Making an object anew may run code of its class, which may raise.)"""
    try:
        return pickle.loads(report.payload)
    except Exception as error:
        raise WorkerError(
            f"rank {report.rank} returned a value that cannot be made anew here: "
            f"{type(error).__name__}: {described(error)}. Return tensors, numbers, or containers "
            "of them",
            rank=report.rank,
        ) from error


def _check_open_files(world_size: int) -> None:
    """Refuse more ranks than this process can hold pipes to."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = (most - _OPEN_FILES) // _OPEN_FILES_PER_RANK
    if world_size > room:
        fewer = f"use at most {room} ranks, or " if room > 0 else ""
        raise ValueError(
            f"world_size {world_size} needs about "
            f"{_OPEN_FILES + world_size * _OPEN_FILES_PER_RANK} open files, and this process may "
            f"have {most}: {fewer}raise the limit (ulimit -n) before Python starts"
        )


def _check_program() -> None:
    """Refuse a program that the ranks' processes could not load."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and path and not os.path.exists(path):
        raise ValueError(
            f"this program was read from {path}, and the ranks' processes have to load it again: "
            "save it as a file and run that"
        )


def _pack(fn: Callable, args: tuple) -> bytes:
    import cloudpickle

    from labkit.runtime.worker import UnpicklableError

    if not callable(fn):
        raise ValueError(f"fn must be a function of a comm, got {type(fn).__name__}")
    try:
        return cloudpickle.dumps((fn, args))
    except Exception as error:
        culprit = next(filter(None, map(_unpicklable, _used_by(fn, args).items())), "a part of it")
        raise UnpicklableError(
            f"{getattr(fn, '__name__', 'fn')} cannot be sent to other processes: it uses "
            f"{culprit}, which cannot be pickled ({error}). Make that inside the function."
        ) from None


def _used_by(fn: Callable, args: tuple) -> dict[str, Any]:
    """What ``fn`` would take along: its arguments, the globals it names, its closure."""
    code = getattr(fn, "__code__", None)
    used = {f"args[{index}]": arg for index, arg in enumerate(args)}
    if code is not None:
        used |= {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
        cells = (cell.cell_contents for cell in fn.__closure__ or ())
        used |= dict(zip(code.co_freevars, cells))
    return used


def _unpicklable(item: tuple[str, Any]) -> str:
    """The path to what cannot be pickled in a named value; empty when all of it can."""
    import cloudpickle

    from labkit.runtime.worker import offender

    try:
        cloudpickle.dumps(item[1])
    except Exception:
        return offender(*item)
    return ""
