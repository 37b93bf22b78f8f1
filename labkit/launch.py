"""``labkit.run``: a function on P real processes, and what becomes of it.

The engine is PyTorch's elastic agent (what ``torchrun`` runs), on a forkserver that has torch
imported already, so that a run starts in tenths of a second. The agent works in a thread: it then
leaves the calling process's signal handlers alone, and the caller can watch, print, and be
stopped. Around it stands a supervisor: it reads what the ranks report and print, finds ranks that
are gone or stuck, and ends a run whole, whatever happened.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from labkit.board import RETURNED, Board, explain
from labkit.devices import check_world_size, plan
from labkit.errors import DeadlineError, DeadlockError, WorkerError
from labkit.live import Output, ProgressBar
from labkit.sources import cell_sources, learner_frames, readable
from labkit.trace import Trace

_AGENT_THREAD = "labkit-agent"
_ENGINE_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.multiprocessing.spawn",
)
_POLL_S = 0.05
# After a first sign of failure: time for the ranks' own reports and exit codes to come in.
_SETTLE_S = 0.5
_EXIT_CODE_S = 0.6


@dataclass(frozen=True)
class RunResult:
    """What a run gave.

    Attributes:
        values: what ``fn`` returned, by rank.
        trace: the spans of all ranks.
        duration_s: the longest time that ``fn`` took on a rank, launch not counted.
        messages: messages sent, by rank.
        bytes_sent: payload bytes sent, by rank.
    """

    values: list[Any]
    trace: Trace = field(repr=False)
    duration_s: float
    messages: list[int]
    bytes_sent: list[int]


def run(
    fn: Callable,
    *args: Any,
    world_size: int,
    device: str = "auto",
    timeout_s: float = 120,
) -> RunResult:
    """Call ``fn(comm, *args)`` on ``world_size`` processes, and gather what they return.

    Args:
        fn: a function of a ``Comm`` and ``args``; one defined in a notebook cell is welcome.
        args: further arguments, the same on every rank.
        world_size: P, the number of ranks.
        device: ``auto`` (GPUs where there are any), ``cpu`` or ``cuda``.
        timeout_s: the whole run's deadline, counted from the start of the ranks.

    Raises:
        ValueError: an impossible world size, device or timeout; ``fn`` or ``args`` that cannot
            travel; a run inside a run.
        WorkerError: a rank raised, was killed, or left early.
        DeadlockError: the ranks can never finish; the message says why.
        DeadlineError: the deadline passed; the message holds each rank's stack.

    Under ``torchrun`` the ranks exist already: then this process is one of them.
    """
    from labkit import worker

    if worker.inside_a_run or multiprocessing.parent_process() is not None:
        raise ValueError(
            "labkit.run was called inside a rank of another run: start runs from the notebook or "
            'the script. (In a script, keep the call under if __name__ == "__main__":)'
        )
    check_world_size(world_size)
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0, got {timeout_s!r}")
    if under_torchrun():
        return worker.run_under_torchrun(fn, args, world_size, device, timeout_s)
    placement = plan(world_size, device)
    if placement.note:
        print(placement.note)
    job = worker.Job(_pack(fn, args), cell_sources(), placement, timeout_s)
    return _Supervisor(job, world_size, timeout_s).run()


def _pack(fn: Callable, args: tuple) -> bytes:
    import cloudpickle

    from labkit.worker import UnpicklableError

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

    from labkit.worker import offender

    try:
        cloudpickle.dumps(item[1])
    except Exception:
        return offender(*item)
    return ""


def under_torchrun() -> bool:
    """Whether ``torchrun`` has started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def warm_up() -> None:
    """Start the process that all ranks are forked from, in the background; returns at once.

    It imports torch (some seconds). A notebook calls this first, so that it is ready when the
    reader comes to the first run; a run starts it by itself otherwise.
    """
    if under_torchrun() or _start_method() != "forkserver":
        return
    # Ctrl-C and the stop button signal the whole process group; the server would die of it while
    # it imports. It inherits the mask of the thread that starts it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start_method() -> str:
    """``forkserver`` with torch preloaded (0.1 s a start); ``spawn`` where the system has none."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    # An optimizer imports torch._dynamo when the first one is made: seconds in every rank.
    preload = ["labkit.worker", "labkit.train", "torch._dynamo"]
    multiprocessing.forkserver.set_forkserver_preload(preload)
    return "forkserver"


def _quieten_engine() -> None:
    """Keep the engine's log of our agent out of the notebook: the supervisor says it better."""

    def not_ours(record: logging.LogRecord) -> bool:
        return record.threadName != _AGENT_THREAD

    for name in _ENGINE_LOGGERS:
        logger = logging.getLogger(name)
        if not any(getattr(f, "__name__", "") == not_ours.__name__ for f in logger.filters):
            logger.addFilter(not_ours)


class _Agent(threading.Thread):
    """PyTorch's local elastic agent in a thread of its own, which can be told to stop."""

    def __init__(self, context, world_size: int, args: tuple, done: Connection):
        super().__init__(name=_AGENT_THREAD, daemon=True)
        self.failures: dict[int, Any] = {}
        self.error: BaseException | None = None
        self._done = done
        self._stop_asked = threading.Event()
        self._settings = (context.get_start_method(), world_size, args)

    def stop(self) -> None:
        self._stop_asked.set()

    def run(self) -> None:
        try:
            self._run_agent()
        except BaseException as error:
            self.error = error
        finally:
            self._done.close()

    def _run_agent(self) -> None:
        from torch.distributed.elastic.agent.server.api import RunResult as AgentResult
        from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

        from labkit.worker import run_rank

        method, world_size, args = self._settings
        stop_asked = self._stop_asked

        class Agent(LocalElasticAgent):
            def _monitor_workers(self, worker_group):
                if stop_asked.is_set():
                    return AgentResult(state=WorkerState.FAILED)
                return super()._monitor_workers(worker_group)

        # Port 0: the system picks a free one, so that two courses never meet on 29500.
        where = RendezvousParameters(
            backend="c10d",
            endpoint="127.0.0.1:0",
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
            is_host=True,
        )
        rendezvous = registry.get_rendezvous_handler(where)
        spec = WorkerSpec(
            role="labkit",
            local_world_size=world_size,
            entrypoint=run_rank,
            args=args,
            rdzv_handler=rendezvous,
            max_restarts=0,
            monitor_interval=0.02,
            local_addr="127.0.0.1",
        )
        logs = DefaultLogsSpecs(log_dir=os.devnull)
        _quieten_engine()
        try:
            result = Agent(spec, logs, start_method=method).run()
            self.failures = dict(result.failures)
        finally:
            rendezvous.shutdown()


class _Supervisor:
    """Watches one run from outside and ends it whole."""

    def __init__(self, job, world_size: int, timeout_s: float):
        context = multiprocessing.get_context(_start_method())
        self.world_size = world_size
        self.timeout_s = timeout_s
        memory = context.RawArray(ctypes.c_byte, Board.num_bytes(world_size))
        self.board = Board(world_size, memory)
        controls = [Pipe(duplex=False) for _ in range(world_size)]
        outputs = [Pipe(duplex=False) for _ in range(world_size)]
        self.agent_done, done = Pipe(duplex=False)
        self.controls = {receiver: rank for rank, (receiver, _) in enumerate(controls)}
        self.output = Output([receiver for receiver, _ in outputs])
        self.bar = ProgressBar(self.board)
        self._workers_ends = [sender for _, sender in (*controls, *outputs)]
        ends = ([sender for _, sender in controls], [sender for _, sender in outputs])
        self.agent = _Agent(context, world_size, (job, memory, *ends), done)
        self.reports: dict[int, Any] = {}
        self.gone: set[int] = set()
        self._looked_s = 0.0
        self._ticks: tuple[int, ...] = ()
        self._stuck: list[int] = []

    def run(self) -> RunResult:
        warm_up()
        self.started_s = time.monotonic()
        self.agent.start()
        try:
            verdict = self._watch()
        finally:
            self._end()
        if verdict is not None:
            raise verdict
        return self._result()

    def _watch(self) -> WorkerError | None:
        """Until every rank has returned (None), or the run has failed (the error to raise)."""
        failed_s: float | None = None
        while True:
            self._read(_POLL_S)
            self.output.show({*self.reports, *self.gone})
            self.bar.update()
            now_s = time.monotonic()
            bad = [report for report in self.reports.values() if report.kind != "value"]
            if not self.agent.is_alive() and not bad and not self.gone:
                if self.agent.error is not None:
                    raise WorkerError(f"the ranks could not be started: {self.agent.error}")
                if len(self.reports) == self.world_size and not self.agent.failures:
                    return None
            if bad or self.gone or not self.agent.is_alive():
                failed_s = failed_s or now_s
                if self._settled(bad, now_s - failed_s):
                    return self._failure(bad)
            elif stuck := self._check_stuck():
                return self._deadlock(stuck)
            if now_s - self.started_s > self.timeout_s:
                return self._deadline()

    def _read(self, timeout_s: float) -> None:
        """Take in what the ranks have sent."""
        sources = [*self.controls, *self.output.connections]
        if self.agent.is_alive():
            sources.append(self.agent_done)
        self._close_own_ends()
        for ready in wait(sources, timeout_s):
            if ready in self.controls:
                self._read_report(ready)
            elif ready is self.agent_done:
                self.agent.join()
            else:
                self.output.read(ready)

    def _close_own_ends(self) -> None:
        # Once every rank runs, its pipe must end with it: then the copies here must go.
        if self._workers_ends and (all(self.board.ranks["pid"]) or not self.agent.is_alive()):
            for connection in self._workers_ends:
                connection.close()
            self._workers_ends = []

    def _read_report(self, control: Connection) -> None:
        rank = self.controls[control]
        try:
            self.reports[rank] = pickle.loads(control.recv_bytes())
        except (EOFError, OSError):
            if rank not in self.reports:
                self.gone.add(rank)
            del self.controls[control]
            control.close()

    def _settled(self, bad: list, waited_s: float) -> bool:
        if any(report.kind != "peer_lost" for report in bad):
            return True
        if self.gone:
            # The agent knows a code other than 0; it never ends for a rank that left with 0.
            return not self.agent.is_alive() or waited_s > _EXIT_CODE_S
        return waited_s > _SETTLE_S

    def _check_stuck(self) -> list[int]:
        """Ranks that can never go on, seen twice with nothing moved in between."""
        if time.monotonic() - self._looked_s < _POLL_S:
            return []
        self._looked_s = time.monotonic()
        ticks = self.board.ticks()
        stuck = self.board.copy().stuck()
        still = stuck and stuck == self._stuck and ticks == self._ticks
        self._ticks, self._stuck = ticks, stuck
        return stuck if still else []

    def _failure(self, bad: list) -> WorkerError:
        """The error for ranks that raised or are gone, the cause before its consequences."""
        causes = [report for report in bad if report.kind != "peer_lost"]
        if causes:
            return self._raised(causes[0])
        left = {rank: self._how_it_left(rank) for rank in self._left()}
        if not left:
            return self._raised(bad[0])
        rank, how = next(iter(left.items()))
        waiting = self._waiting_for(rank)
        message = f"rank {rank} {how}.{waiting} The other ranks were ended."
        clean = "exit code 0" in how
        return (DeadlockError if waiting and clean else WorkerError)(message, rank=rank)

    def _left(self) -> list[int]:
        # Once one rank is dead the engine ends the rest: its record names the first.
        return sorted(self.agent.failures) or sorted(self.gone)

    def _how_it_left(self, rank: int) -> str:
        failure = self.agent.failures.get(rank)
        if failure is None:
            return "left early with exit code 0, before its function had returned"
        if failure.exitcode >= 0:
            return (
                f"left early with exit code {failure.exitcode}, before its function had returned"
            )
        name = signal.Signals(-failure.exitcode).name
        when = "before it had started" if not self.board.ranks[rank]["state"] else "in mid-run"
        if self.board.ranks[rank]["state"] == RETURNED:
            when = "after its function had returned"
        hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
        return f"was killed by {name} {when}{hint}"

    def _waiting_for(self, rank: int) -> str:
        board = self.board.copy()
        sentences = []
        for other in range(self.world_size):
            slot = board.ranks[other]
            op = slot["op"].decode()
            if (other != rank and op and rank in (slot["dst"], slot["src"])) or op == "barrier":
                where = readable(slot["location"].decode())
                sentences.append(f" Rank {other} was waiting for it in {op} at {where}.")
        return "".join(sentences)

    def _raised(self, report) -> WorkerError:
        where = readable(report.location)
        trace = readable(report.traceback, quote=False)
        waiting = self._waiting_for(report.rank) if report.kind == "exited" else ""
        message = f"rank {report.rank} {report.summary}"
        if report.kind == "exited":
            message += f".{waiting}"
        if report.kind == "mismatch":
            message = f"{readable(report.summary)}"
        if where:
            message += f"\n  at {where}"
        if report.kind == "raised":
            message += f"\n\nTraceback of rank {report.rank}:\n{trace.rstrip()}"
        kind = DeadlockError if report.kind == "mismatch" or waiting else WorkerError
        return kind(message, rank=report.rank, location=where, worker_traceback=trace)

    def _deadlock(self, stuck: list[int]) -> DeadlockError:
        board = self.board.copy()
        where = readable(board.ranks[stuck[0]]["location"].decode())
        return DeadlockError(readable(explain(board, stuck)), rank=stuck[0], location=where)

    def _deadline(self) -> DeadlineError:
        board = self.board.copy()
        lines = [f"the run was still going at its deadline of {self.timeout_s:g} s (timeout_s)."]
        for rank, stack in sorted(self._stacks().items()):
            doing = f"in {op}" if (op := board.ranks[rank]["op"].decode()) else "in its own code"
            lines.append(f"rank {rank} was {doing}:\n{readable(learner_frames(stack))}")
        returned = [r for r in range(self.world_size) if board.ranks[r]["state"] == RETURNED]
        if returned:
            lines.append(f"ranks that had returned: {returned}.")
        lines.append("Next step: look for a loop without an end, or give the run more timeout_s.")
        return DeadlineError("\n".join(lines))

    def _stacks(self) -> dict[int, str]:
        """Ask each running rank for its stack, and collect what comes within half a second."""
        self.output.flush()
        asked = [r for r in range(self.world_size) if self.board.ranks[r]["state"] != RETURNED]
        for rank in asked:
            self._signal(rank, signal.SIGUSR1)
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            self._read(0.05)
        return {rank: self.output.take_pending(rank) for rank in asked}

    def _signal(self, rank: int, number: int) -> None:
        pid = int(self.board.ranks[rank]["pid"])
        if pid and rank not in self.gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end(self) -> None:
        """Leave nothing: processes ended and joined, pipes closed, the last output shown."""
        while True:
            try:
                self._end_ranks()
                break
            except KeyboardInterrupt:
                # A second Ctrl-C must not leave the ranks behind; ending them takes a moment.
                continue
        for _ in range(100):
            if not self.output.connections or not wait(self.output.connections, 0):
                break
            for ready in wait(self.output.connections, 0):
                self.output.read(ready)
        self.bar.close()
        self.output.flush()
        self.output.close()
        for connection in (*self.controls, *self._workers_ends, self.agent_done):
            connection.close()

    def _end_ranks(self) -> None:
        self.agent.stop()
        while self.agent.is_alive():
            for rank in range(self.world_size):
                if rank not in self.reports or self.reports[rank].kind != "value":
                    self._signal(rank, signal.SIGKILL)
            self.agent.join(0.1)

    def _result(self) -> RunResult:
        reports = [self.reports[rank] for rank in range(self.world_size)]
        return RunResult(
            values=[pickle.loads(report.payload) for report in reports],
            trace=Trace.merge(report.spans for report in reports),
            duration_s=max(report.duration_s for report in reports),
            messages=[report.messages for report in reports],
            bytes_sent=[report.bytes_sent for report in reports],
        )
