"""A run on this machine, from outside: start the ranks, watch them, and end them completely.

``labkit.engine.runtime.failures`` makes an error of what the supervisor has seen.
"""

import contextlib
import multiprocessing.forkserver
import multiprocessing.util
import os
import pickle
import secrets
import signal
import socket
import time
from dataclasses import replace
from multiprocessing.connection import Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from labkit.engine.comm.board import LOST, RUNNING
from labkit.engine.comm.deadlock import stuck_ranks
from labkit.engine.comm.shared_memory import Arena
from labkit.engine.errors import WorkerError
from labkit.engine.runtime.failures import (
    Evidence,
    deadline_error,
    deadlock_error,
    failure_error,
    remove_empty_segments,
)
from labkit.engine.runtime.messages import Report, trace_of
from labkit.engine.runtime.output import Output, Watcher
from labkit.engine.runtime.preload import interrupts_later, warm_up
from labkit.engine.runtime.worker import GO, Job, run_rank
from labkit.engine.started import MARK, RANK_NAME, RUN
from labkit.engine.tracing import Trace

_POLL_S = 0.05
# The cause of a failure may come so long after the first of its consequences.
_SETTLE_S = 0.5
_STACKS_S = 0.5
# Time for ranks that have returned to clean up and exit, and for killed ranks to disappear.
_LEAVE_PATIENCE_S = 3.0
_END_PATIENCE_S = 10.0
# Time for a killed server of ranks to be gone.
_SERVER_PATIENCE_S = 5.0


def _start_rank(process: BaseProcess) -> None:
    """Start a rank, also where the server that forks ranks was killed a moment ago."""
    try:
        process.start()
    except (ConnectionError, EOFError):
        # It serves no more, and may not be gone yet; once it is, Python starts another.
        server: Any = multiprocessing.forkserver._forkserver
        until_s = time.monotonic() + _SERVER_PATIENCE_S
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while time.monotonic() < until_s and not os.waitid(
            os.P_PID, server._forkserver_pid, options
        ):
            time.sleep(_POLL_S)
        process.start()


class Supervisor:
    """Starts, watches and ends the ranks of one run; ``lost`` is then as in ``RunResult``."""

    def __init__(self, job: Job):
        # First: in a rank that imports an unguarded script it raises, before a folder is made.
        warm_up(training=False)
        self.job = job
        self.lost: dict[int, str] = {}
        self.exit_codes: dict[int, int | None] = {}
        self._processes: list[BaseProcess] = []
        self._arena = Arena(job.world_size)
        self._output = Output()
        self._evidence = Evidence(self._arena.board, job.may_lose, exit_codes=self.exit_codes)
        self._controls: list[socket.socket] = []
        # By rank: those whose report has not come, and what has arrived of it.
        self._reporting: dict[int, socket.socket] = {}
        self._arrived: dict[int, bytearray] = {}
        self._last_look: object = None
        # The ranks' store, in the forkserver's folder, which it removes if its caller cannot.
        self._store_path = f"{multiprocessing.util.get_temp_dir()}/store-{secrets.token_hex(8)}"
        # The first watcher's imports take their time while the forkserver does its own.
        self._watcher = Watcher(self._evidence.board)

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks that were started, in rank order."""
        return [process.pid or 0 for process in self._processes]

    def run(self) -> list[Report | None]:
        """The reports of all ranks, None of a ``lost`` one; WorkerError if the run has failed."""
        __tracebackhide__ = True
        trace = None
        try:
            self._start()
            error = self._watch()
            for rank in sorted(self._evidence.lost):
                self.lost[rank] = self._evidence.explain_loss(rank)
            if error is None:
                trace = trace_of(self._evidence.reports.values())
                self._let_go()
        finally:
            with interrupts_later():
                self._end(trace)
        if error is not None:
            remove_empty_segments()
            raise error
        reports: list[Report | None] = []
        for rank in range(self.job.world_size):
            report = None
            if rank not in self.lost:
                report = self._evidence.reports[rank]
            reports.append(report)
        return reports

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        size = str(self.job.world_size)
        for rank in range(self.job.world_size):
            control, rank_control = socket.socketpair()
            output, rank_output = Pipe(duplex=False)
            self._controls.append(control)
            self._reporting[rank] = control
            self._arrived[rank] = bytearray()
            self._output.follow(output)
            # The caller's variables as they are now, and those that torchrun sets for a rank.
            environment = os.environ.copy() | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, MARK: RUN}
            job = self.job, self._arena, self._store_path
            process = context.Process(
                target=run_rank,
                args=(environment, rank_control, rank_output, *job),
                name=f"{RANK_NAME}{rank}",
            )
            # The rank's ends must close when it ends: no other process may hold them open.
            # An interrupt must not leave half a rank, of which nobody knows.
            with rank_control, rank_output, interrupts_later():
                _start_rank(process)
                self._processes.append(process)

    def _watch(self) -> WorkerError | None:
        """Watch until all ranks have returned (None) or the run has failed (an error to raise)."""
        evidence = self._evidence
        failed_s = 0.0
        deadline_s = time.monotonic() + self.job.timeout_s
        while True:
            self._read(_POLL_S)
            self._output.show()
            self._watcher.update()
            now_s = time.monotonic()
            failures = evidence.failures
            missing = evidence.missing
            ended = {*evidence.reports, *evidence.lost}
            if len(ended) == self.job.world_size and not failures:
                return None
            if failures or missing:
                failed_s = failed_s or now_s
                kinds = {report.kind for report in failures}
                # The cause of a lost peer, and who will wait for a rank that exits, come later.
                has_cause = missing or kinds - {"peer_lost", "exited"}
                if has_cause or now_s - failed_s > _SETTLE_S:
                    return failure_error(evidence)
            else:
                stuck = self._stuck_ranks()
                if stuck:
                    return deadlock_error(evidence.board, stuck)
            if now_s > deadline_s:
                # The error describes the ranks as they are before a signal asks them.
                before = replace(evidence, board=evidence.board.copy())
                return deadline_error(before, self.job.timeout_s, self._stacks())

    def _read(self, timeout_s: float) -> None:
        """Read what the ranks have sent, and note which ranks have ended."""
        running = {}
        for rank, process in enumerate(self._processes):
            if rank not in self.exit_codes:
                running[process.sentinel] = rank
        sources = [*self._reporting.values(), *self._output.connections, *running]
        ready = set(wait(sources, timeout_s))
        self._output.read(ready)
        ended = [running[sentinel] for sentinel in running.keys() & ready]
        for rank, control in list(self._reporting.items()):
            if control in ready or rank in ended:
                self._receive(rank, control)
        for rank in ended:
            self.exit_codes[rank] = self._processes[rank].exitcode
        rows = self._evidence.board.ranks
        for rank in self._evidence.lost:
            if rows[rank]["state"] == RUNNING:
                rows[rank]["state"] = LOST

    def _receive(self, rank: int, control: socket.socket) -> None:
        """Read what there is of a rank's report, and do not wait for a rank that is stopped."""
        while wait([control], 0):
            data = b""
            with contextlib.suppress(OSError):
                data = control.recv(1 << 20)
            self._arrived[rank] += data
            if not data:
                del self._reporting[rank]
                # A rank that was killed has sent a part, or nothing.
                with contextlib.suppress(EOFError, pickle.UnpicklingError):
                    self._evidence.reports[rank] = pickle.loads(self._arrived[rank])
                return

    def _stuck_ranks(self) -> list[int]:
        """The ranks that can never continue: found stuck twice, with no progress in between."""
        ticks = self._evidence.board.ranks["ticks"].tolist()
        stuck = stuck_ranks(self._evidence.board.copy())
        is_unchanged = (stuck, ticks) == self._last_look
        self._last_look = (stuck, ticks)
        return stuck if is_unchanged else []

    def _stacks(self) -> dict[int, str]:
        """Ask the running ranks for their stacks, and collect those that arrive in time."""
        self._output.flush()
        states = self._evidence.board.ranks["state"]
        running_ranks = []
        for rank, state in enumerate(states):
            if state == RUNNING and rank not in self.exit_codes:
                running_ranks.append(rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], signal.SIGUSR1)
        until_s = time.monotonic() + _STACKS_S
        while running_ranks and time.monotonic() < until_s:
            self._read(_POLL_S)
        return {rank: self._output.take_pending(rank) for rank in running_ranks}

    def _let_go(self) -> None:
        """Let the ranks clean up and exit by themselves, within a limited time."""
        for control in self._controls:
            with contextlib.suppress(OSError):
                control.send(GO)
        until_s = time.monotonic() + _LEAVE_PATIENCE_S
        while len(self.exit_codes) < self.job.world_size and time.monotonic() < until_s:
            self._read(_POLL_S)

    def _end(self, trace: Trace | None) -> None:
        """Leave nothing behind: end and join processes, show the last output, close the pipes."""
        for rank, pid in enumerate(self.pids):
            # The processes that a rank has started end, too.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            if rank not in self.exit_codes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.join(_END_PATIENCE_S)
        for _ in range(100):
            ready = wait(self._output.connections, 0)
            if not ready:
                break
            self._output.read(ready)
        self._watcher.close(trace)
        self._output.flush()
        self._output.close()
        for control in self._controls:
            control.close()
        Path(self._store_path).unlink(missing_ok=True)
        # The traceback of an error keeps this object alive; it must not keep the shared memory.
        del self._evidence.board, self._watcher
        self._arena.close()
