"""``labkit.run``: call a function on P real processes, and gather what they return."""

import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.engine.comm.emulated_link import EmulatedLink, check_link
from labkit.engine.comm.peak_memory import PeakMemory
from labkit.engine.comm.source_lines import cell_sources
from labkit.engine.devices import check_world_size, plan, print_once
from labkit.engine.runtime.failures import process_limit, reached_limit
from labkit.engine.runtime.messages import Report, dump_call, trace_of
from labkit.engine.runtime.plain import load_plain
from labkit.engine.runtime.preload import check_may_start
from labkit.engine.runtime.supervisor import Supervisor
from labkit.engine.runtime.worker import Job, open_comm
from labkit.engine.started import INSIDE, started_as_rank
from labkit.engine.tracing import Trace
from labkit.engine.tracing.limits import Limit, what_limited
from labkit.units import MOST_SECONDS, check_above_zero

# The report of a rank that was lost: nothing is known of what it has sent.
_LOST = Report(-1, "lost")


@dataclass(frozen=True)
class RunResult:
    """The result of a run: what ``fn`` returned and sent on each rank.

    ``duration_s`` is the longest time that ``fn`` took on any rank, without the launch; ``lost``
    is {rank: why} for the ranks in ``may_lose`` that ended early; ``peak_memory`` the most memory
    that ``fn`` took, by rank.
    """

    values: list[Any]
    trace: Trace = field(repr=False)
    duration_s: float
    messages: list[int]
    bytes_sent: list[int]
    lost: dict[int, str] = field(default_factory=dict)
    peak_memory: list[PeakMemory | None] = field(repr=False, default_factory=list)

    def explain(self) -> Limit:
        """Explain what limited the run: computing, messages, or waiting and for whom."""
        return what_limited(self.trace, start_s=0.0)


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
    hosts: int | None = None,
) -> RunResult:
    """Call ``fn(comm, *args)`` on ``world_size`` processes, and gather what they return.

    Args:
        fn: a function of a ``Comm`` and ``args``; it may be defined in a notebook cell.
        world_size: P, the number of ranks.
        device: ``auto`` (GPUs if any can be used), ``cpu`` or ``cuda``.
        devices: by rank (a launcher's by LOCAL_RANK), as ``"cuda:2,cuda:3"``; see ``plan``.
        transport: ``shared`` (memory, on one machine), ``gloo``, or ``auto``: shared memory for
            CPU ranks, NCCL for ranks with a GPU each.
        timeout_s: the deadline of the whole run, in seconds from the start of the ranks.
        may_lose: ranks that the run can do without: who waits for one that has failed gets a
            PeerLostError. (On this machine; GPUs then use gloo.)
        link: an emulated link, which makes messages slower.
        hosts: the number of nodes of a Ray cluster that the ranks are spread over.

    Under ``torchrun``, or with its variables, this process is a rank; all get the same result.

    Raises:
        ValueError: impossible settings; what cannot be pickled; a run inside a run.
        WorkerError: a rank raised, was killed, or exited early.
        DeadlockError: the ranks can never finish; or, a DeadlineError, not in time.
    """
    __tracebackhide__ = True
    expendable = frozenset(may_lose)
    _check_may_run()
    check_world_size(world_size, warn=hosts is None)
    check_above_zero("timeout_s", timeout_s, MOST_SECONDS)
    check_link(link)
    # What a launcher or Ray need is imported only with them.
    if started_as_rank() is not None:
        from labkit.engine.runtime import torchrun

        if hosts is not None:
            raise ValueError(f"hosts={hosts!r}: leave hosts out, the ranks were started already")
        settings = world_size, device, transport, timeout_s, link, devices
        return _result(torchrun.run_as_rank(fn, args, *settings), link)
    if hosts is not None:
        from labkit.engine.runtime.ray_ranks import run_on

        choice = device, transport, devices
        return _result(run_on(hosts, fn, args, world_size, choice, timeout_s, link), link)
    chosen = plan(world_size, device, transport, devices=devices)
    if expendable and transport == "auto" and chosen.backend == "nccl":
        # A group of NCCL does not outlive any of its ranks.
        chosen = plan(world_size, device, "gloo", devices=devices)
    print_once(chosen.note)
    call = dump_call(fn, args)
    return _run_here(Job(call, cell_sources(), chosen, world_size, timeout_s, expendable, link))


def _check_may_run() -> None:
    if open_comm() is not None:
        raise ValueError(INSIDE)
    check_may_start()


def _run_here(job: Job) -> RunResult:
    """Carry out a run on this machine; OSError, with its numbers, for a limit of the system."""
    __tracebackhide__ = True
    try:
        supervisor = Supervisor(job)
        reports = supervisor.run()
    except EOFError:
        raise ConnectionError(
            "the ranks could not be started: the process that they are forked from has ended, and "
            f"stderr may say why. Perhaps there may be no more processes: {process_limit()}"
        ) from None
    except OSError as error:
        limit = reached_limit(error)
        if limit:
            raise OSError(f"the ranks could not be started: {error}. {limit}") from None
        raise
    return _result(reports, job.link, supervisor.lost)


def _value(report: Report | None) -> Any:
    if report is None:
        return None
    if report.is_plain:
        return load_plain(report.payload)
    return pickle.loads(report.payload)


def _result(
    reports: Sequence[Report | None],
    link: EmulatedLink | None,
    lost: dict[int, str] | None = None,
) -> RunResult:
    counted = [report or _LOST for report in reports]
    return RunResult(
        values=[_value(report) for report in reports],
        trace=trace_of(filter(None, reports), link),
        duration_s=max(report.duration_s for report in counted),
        messages=[report.messages for report in counted],
        bytes_sent=[report.bytes_sent for report in counted],
        lost=lost or {},
        peak_memory=[report.peak_memory for report in counted],
    )
