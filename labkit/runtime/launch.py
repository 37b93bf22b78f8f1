"""``labkit.run``: call a function on P real processes, and gather what they return."""

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.comm.emulated_link import EmulatedLink
from labkit.comm.peak_memory import PeakMemory
from labkit.comm.source_lines import cell_sources
from labkit.devices import Plan, check_world_size, plan, tell_once
from labkit.runtime import torchrun
from labkit.runtime.between_hosts.reports import load_plain
from labkit.runtime.forkserver import late_variables
from labkit.runtime.limits import Limit, what_limited, without_spans
from labkit.runtime.messages import Report, trace_of
from labkit.runtime.nccl_sharing import check_sharing
from labkit.runtime.objects import kernel
from labkit.runtime.pickling import dump_call, load_value
from labkit.runtime.preload import under_torchrun
from labkit.runtime.supervisor import Supervisor
from labkit.runtime.worker import Job
from labkit.trace import Trace
from labkit.units import (
    MOST_SECONDS,
    check_above_zero,
    check_integer,
    format_bytes,
    format_seconds,
    spelled,
)

# Per rank: both ends of two pipes, and two descriptors that report how its process ends.
_OPEN_FILES_PER_RANK = 6
# What Python, a notebook's kernel and the learner's program hold open.
_OPEN_FILES = 100
# From this size on, all results together, a result takes about a second and is worth a word.
LARGE_RESULT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        values: what ``fn`` returned, by rank.
        trace: the spans of all ranks, and their devices.
        duration_s: the longest time that ``fn`` took on any rank, without the launch.
        messages: messages sent, by rank.
        bytes_sent: payload bytes sent, by rank.
        lost: {rank: why} for the ranks in ``may_lose`` that ended early. Their values are None,
            and their messages, bytes, spans and memory are not included.
        peak_memory: by rank, the most memory that ``fn`` took, see ``PeakMemory``.
    """

    values: list[Any]
    trace: Trace = field(repr=False)
    duration_s: float
    messages: list[int]
    bytes_sent: list[int]
    lost: dict[int, str] = field(default_factory=dict)
    peak_memory: list[PeakMemory | None] = field(repr=False, default_factory=list)

    def explain(self) -> Limit:
        """What limited the run: computing, messages, or waiting and for whom, in words."""
        if not self.trace.spans:
            return without_spans(self.duration_s)
        return what_limited(self.trace, start_s=0.0)


@spelled
def run(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int,
    device: str = "auto",
    devices: str | Sequence[str] | None = None,
    transport: str = "auto",
    timeout_s: float = 120,
    may_lose: Collection[int] = (),
    link: EmulatedLink | None = None,
    hosts: int | str | Sequence[str] | None = None,
) -> RunResult:
    """Call ``fn(comm, *args)`` on ``world_size`` processes, and gather what they return.

    Args:
        fn: a function of a ``Comm`` and ``args``; it may be defined in a notebook cell.
        args: further arguments, the same on every rank.
        world_size: P, the number of ranks.
        device: ``auto`` (GPUs if any can be used), ``cpu`` or ``cuda``.
        devices: by rank (under ``torchrun`` by LOCAL_RANK), as ``"cuda:2,cuda:3"``; see ``plan``.
        transport: ``shared`` (memory, on one machine), ``gloo`` or ``nccl``, or ``auto``: shared
            memory for CPU ranks (where the system has it), NCCL for ranks with a GPU each.
        timeout_s: the deadline of the whole run, in seconds from the start of the ranks.
        may_lose: ranks that the run can do without: if one fails later, the others get a
            PeerLostError where they wait for it. (Not under ``torchrun``; GPUs then use gloo.)
        link: an emulated link, which makes messages slower.
        hosts: nodes of a Ray cluster (``labkit[cluster]``) on which the ranks are spread evenly,
            host by host: how many, or their addresses; None for this machine.

    Returns:
        The values by rank, the trace, and what was sent; under ``torchrun``, where this process
        is one of the ranks, the same on every rank.

    Raises:
        ValueError: impossible settings; what cannot be pickled; a run inside a run.
        WorkerError: a rank raised, was killed, or exited early.
        DeadlockError: the ranks can never finish; the message says why.
        DeadlineError: the deadline passed; the message holds each rank's stack.
    """
    _check(world_size, timeout_s, may_lose, link, warn=hosts is None)
    told = fn, args, world_size, (device, transport, devices), timeout_s, frozenset(may_lose), link
    if under_torchrun():
        return _run_as_rank(hosts, *told)
    supervisor = _supervisor(*told) if hosts is None else _supervisor_on(hosts, *told)
    return _result(supervisor.run(), supervisor.lost)


# Device, transport, devices.
_Where = tuple[str, str, str | Sequence[str] | None]


def _run_as_rank(
    hosts: object,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    where: _Where,
    timeout_s: float,
    _may_lose: frozenset[int],
    link: EmulatedLink | None,
) -> RunResult:
    """This process is one of torchrun's ranks."""
    if hosts is not None:
        raise ValueError(
            f"hosts={hosts!r}: torchrun has started the ranks of this run already. Leave hosts "
            "out, or start without torchrun"
        )
    device, transport, devices = where
    here = world_size, device, transport, timeout_s, link, devices
    return _result(torchrun.run_as_rank(fn, args, *here))


def _supervisor(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    where: _Where,
    timeout_s: float,
    may_lose: frozenset[int],
    link: EmulatedLink | None,
) -> Supervisor:
    """The supervisor of a run whose ranks are on this machine."""
    device, transport, devices = where
    chosen = _planned(world_size, device, transport, devices, bool(may_lose))
    shared = dump_call(fn, args), cell_sources(), chosen, world_size, timeout_s, may_lose
    return Supervisor(Job(*shared, link=link, in_notebook=kernel() is not None))


def _supervisor_on(
    hosts: int | str | Sequence[str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    *told: Any,
) -> Supervisor:
    """The supervisor of a run whose ranks are on other hosts."""
    # It would import much that a run on one machine does not need.
    from labkit.runtime.hosts.launch import supervisor_on

    _check_open_files(world_size)
    return supervisor_on(hosts, fn, args, world_size, *told)


def _planned(
    world_size: int,
    device: str,
    transport: str,
    devices: str | Sequence[str] | None,
    may_lose_some: bool,
) -> Plan:
    """Where the ranks run, with what is to be said of it; refuses what cannot be started here."""
    chosen = plan(world_size, device, transport, devices=devices)
    if may_lose_some and transport == "auto" and chosen.backend == "nccl":
        # A group of NCCL does not outlive any of its ranks.
        chosen = plan(world_size, device, "gloo", devices=devices)
    check_sharing(chosen)
    tell_once(chosen.notes)
    if late := late_variables():
        print(late, file=sys.stderr)
    _check_program()
    _check_open_files(world_size)
    return chosen


def _result(reports: Sequence[Report | None], lost: dict[int, str] | None = None) -> RunResult:
    started_s = time.perf_counter()
    values = [report and _value(report) for report in reports]
    if note := _cost_note(
        [report for report in reports if report], time.perf_counter() - started_s
    ):
        print(note, file=sys.stderr)
    return RunResult(
        values=values,
        trace=trace_of(report for report in reports if report),
        duration_s=max((report.duration_s for report in reports if report), default=0.0),
        messages=[report.messages if report else 0 for report in reports],
        bytes_sent=[report.bytes_sent if report else 0 for report in reports],
        lost=lost or {},
        peak_memory=[report.peak_memory if report else None for report in reports],
    )


def _value(report: Report) -> Any:
    return load_plain(report.payload) if report.is_plain else load_value(report)


def _cost_note(reports: Sequence[Report], load_s: float) -> str:
    """What large results have cost; empty for small ones. ``load_s``: to unpickle all of them."""
    num_bytes = [len(report.payload) for report in reports]
    if sum(num_bytes) < LARGE_RESULT_BYTES:
        return ""
    largest = max(reports, key=lambda report: len(report.payload))
    total_s = largest.travel_s + load_s
    return (
        f"the ranks have returned {format_bytes(sum(num_bytes))} (rank {largest.rank}: "
        f"{format_bytes(max(num_bytes))}): it took {format_seconds(total_s)} to pickle, send and "
        "unpickle, and for a moment the rank and this process held each byte three times. Next "
        "step: return what you need of it (x.sum(), loss.item(), x[:10]), or let the rank save "
        "it: torch.save(x, path)"
    )


def _check(
    world_size: int, timeout_s: float, may_lose: Collection[int], link: object, *, warn: bool
) -> None:
    if torchrun.inside_a_run or multiprocessing.parent_process() is not None:
        raise ValueError(
            "labkit.run was called inside a rank of another run: start runs from the notebook or "
            'the script. In a script, keep the call under if __name__ == "__main__":'
        )
    check_world_size(world_size, warn=warn)
    for rank in may_lose:
        check_integer("a rank in may_lose", rank, least=0)
    if not set(may_lose) <= set(range(world_size)):
        raise ValueError(
            f"may_lose {sorted(may_lose)}: with world_size {world_size} the ranks are 0 to "
            f"{world_size - 1}"
        )
    check_above_zero("timeout_s", timeout_s, MOST_SECONDS)
    if not isinstance(link, EmulatedLink | None):
        raise ValueError(
            f"link {link!r} is not a labkit.EmulatedLink: give EmulatedLink(latency_s, "
            "bandwidth_bytes_per_s), or leave link out"
        )


def _check_open_files(world_size: int) -> None:
    """Refuse more ranks than this process can hold pipes to."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = (most - _OPEN_FILES) // _OPEN_FILES_PER_RANK
    if world_size > room:
        fewer = f"use at most {room} ranks, or " if room > 0 else ""
        raise ValueError(
            f"world_size {world_size} needs about "
            f"{_OPEN_FILES + world_size * _OPEN_FILES_PER_RANK} open files, and this process may "
            f"have {most}: {fewer}raise the limit (ulimit -n) before you start Python"
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
