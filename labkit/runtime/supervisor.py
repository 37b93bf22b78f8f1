"""A run on this machine, from outside: start the ranks, watch them, and end them completely.

The supervisor reads what the ranks report and print, finds ranks that are gone or stuck, enforces
the deadline, and leaves no process behind. ``labkit.runtime.failures`` makes an error of what the
supervisor has seen.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any

from labkit.comm.board import LOST, RETURNED, RUNNING
from labkit.comm.deadlock import stuck_ranks
from labkit.comm.processes import is_running, is_stopped, kill_group
from labkit.comm.shared_memory import Arena
from labkit.errors import WorkerError
from labkit.runtime.connect import MeetingFile
from labkit.runtime.failures import (
    Evidence,
    deadline_error,
    deadlock_error,
    failure_error,
    stopped_note,
)
from labkit.runtime.messages import Inbox, Report, trace_of
from labkit.runtime.output import Output
from labkit.runtime.preload import server_fault, start_method, warm_up
from labkit.runtime.shortages import remove_empty_segments, result_too_large
from labkit.runtime.watch import Watcher
from labkit.runtime.worker import GO, Job, run_rank

_POLL_S = 0.05
# How long the cause of a failure may come after the first of its consequences.
_SETTLE_S = 0.5
_STACKS_S = 0.5
# In the first run of a process the forkserver imports torch, which is no part of the run's time.
_START_PATIENCE_S = 120.0
# Time for ranks that have returned to clean up and exit, and for killed ranks to disappear.
_LEAVE_PATIENCE_S = 3.0
_END_PATIENCE_S = 10.0
_SERVER_PATIENCE_S = 2.0
# The exit code that Python gives to a child whose end the forkserver could not report.
_UNKNOWN_CODE = 255


class Supervisor:
    """Starts the ranks of one run, watches them from outside, and ends them completely.

    Args:
        job: what every rank runs.

    Attributes:
        lost: {rank: why} for the ranks in ``job.may_lose`` that ended early; set by ``run``.
        exit_codes: {rank: exit code} in the order in which ranks ended; None if unknown.
    """

    def __init__(self, job: Job):
        self.job = job
        self.lost: dict[int, str] = {}
        self.exit_codes: dict[int, int | None] = {}
        self._arena, self._meeting = Arena(job.world_size), MeetingFile()
        self._seen = Evidence(self._arena.board, job.may_lose, exit_codes=self.exit_codes)
        controls = [Pipe() for _ in range(job.world_size)]
        outputs = [Pipe(duplex=False) for _ in range(job.world_size)]
        self._inboxes = {mine: (rank, Inbox(mine)) for rank, (mine, _) in enumerate(controls)}
        self._output = Output([receiver for receiver, _ in outputs])
        self._rank_ends = [(control, out) for (_, control), (_, out) in zip(controls, outputs)]
        self._processes: list[BaseProcess] = []
        self._fault = ""
        # To start a rank may take long, and the caller has to be interrupted at any time.
        self._starter = threading.Thread(target=self._start, name="labkit-start", daemon=True)
        self._has_started, self._ends = threading.Event(), threading.Event()
        self._launched_s = time.monotonic()
        self._looked_s = 0.0
        self._stuck: tuple[list[int], tuple[int, ...]] = [], ()
        self._watcher: Watcher | None = None

    def run(self) -> list[Report | None]:
        """Start the ranks, wait for all of them, and return their reports in rank order.

        The report of a rank in ``job.may_lose`` that ended early is None, and ``lost`` says why.

        Raises:
            WorkerError: or a subclass of it, if the run has failed.
            KeyboardInterrupt: the caller was interrupted; a note says what each rank was doing.
        """
        try:
            # An interrupt can come between any two of these calls: whatever has started must end.
            warm_up(training=False)
            self._starter.start()
            # The first one's imports take their time while the forkserver does its own.
            self._watcher = Watcher(self._seen.board)
            error = self._watch(self._watcher)
            self.lost = {rank: self._seen.why_lost(rank) for rank in sorted(self._seen.lost)}
            if error is None:
                self._let_go()
        except KeyboardInterrupt as stop:
            board = self._seen.board.copy()
            stop.add_note(stopped_note(board, self._stacks()))
            raise
        finally:
            self._end()
        if error is not None:
            remove_empty_segments()
            raise error
        ranks = range(self.job.world_size)
        return [None if rank in self.lost else self._seen.reports[rank] for rank in ranks]

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the ranks that were started, by rank."""
        return {rank: process.pid or 0 for rank, process in enumerate(list(self._processes))}

    def _start(self) -> None:
        """In a thread: start the ranks."""
        try:
            context: Any = multiprocessing.get_context(start_method())
            with socket.socket() as probe:
                # A free port, for programs that read MASTER_PORT; the ranks meet in a file.
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            shared = self.job, self._arena, self._meeting
            for rank, ends in enumerate(self._rank_ends):
                if self._ends.is_set():
                    break
                process = context.Process(
                    target=run_rank,
                    args=(rank, self._environment(rank, port), *ends, *shared),
                    name=f"labkit-rank-{rank}",
                )
                process.start()
                self._processes.append(process)
                # The rank's pipes must close when it ends: no other process may hold them open.
                for end in ends:
                    end.close()
        except BaseException as error:
            fault = self._server_fault() if isinstance(error, EOFError | OSError) else ""
            self._fault = fault or f"{type(error).__name__}: {error}"
        finally:
            self._has_started.set()

    def _server_fault(self) -> str:
        """How the forkserver has ended; the system may take a moment to tell it."""
        until_s = time.monotonic() + _SERVER_PATIENCE_S
        while not (fault := server_fault()) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return fault

    def _environment(self, rank: int, port: str) -> dict[str, str]:
        """The caller's variables as they are now, and what torchrun sets for a rank."""
        size = str(self.job.world_size)
        names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        names |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        return os.environ.copy() | names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def _watch(self, watcher: Watcher) -> WorkerError | None:
        """Watch until all ranks have returned (None) or the run has failed (an error to raise)."""
        seen = self._seen
        failed_s = started_s = None
        while True:
            self._read(_POLL_S)
            self._output.show({*seen.reports, *self.exit_codes})
            watcher.update(self._output.bars)
            now_s = time.monotonic()
            if len({*seen.reports, *seen.lost}) == self.job.world_size and not seen.failures:
                return None
            if self._fault:
                return WorkerError(f"the ranks could not be started or watched: {self._fault}")
            if seen.failures or seen.missing:
                failed_s = failed_s or now_s
                kinds = {report.kind for report in seen.failures} - {"peer_lost"}
                # The cause of a lost peer, and who will wait for a rank that exits, come later.
                is_cause = bool(kinds - {"exited"} or seen.missing)
                if is_cause or now_s - failed_s > _SETTLE_S:
                    return failure_error(seen)
            elif stuck := self._stuck_ranks():
                return deadlock_error(seen.board, stuck)
            if self._has_started.is_set():
                started_s = started_s or now_s
            begin_s = started_s or self._launched_s + _START_PATIENCE_S
            if now_s > begin_s + self.job.timeout_s:
                # The error describes the ranks as they are before they are asked.
                before = replace(seen, board=seen.board.copy())
                return deadline_error(before, self.job.timeout_s, self._stacks(), self.pids)

    def _read(self, timeout_s: float) -> None:
        """Read what the ranks have sent, and note which ranks have ended."""
        seen = self._seen
        running = {
            process.sentinel: rank
            for rank, process in enumerate(list(self._processes))
            if rank not in self.exit_codes
        }
        ready = set(wait([*self._inboxes, *self._output.connections, *running], timeout_s))
        self._output.read(ready)
        for control in self._inboxes.keys() & ready:
            self._receive(control)
        for sentinel in running.keys() & ready:
            rank = running[sentinel]
            # All that it has sent before its end is there.
            for control in [one for one, (whose, _) in self._inboxes.items() if whose == rank]:
                while control in self._inboxes and wait([control], 0):
                    self._receive(control)
            code = self._processes[rank].exitcode
            if code == _UNKNOWN_CODE and is_running(self.pids[rank]):
                # Nobody but the server knows how ranks end.
                self._fault = self._server_fault()
            else:
                self.exit_codes[rank] = code
        for rank in seen.lost:
            if seen.board.ranks[rank]["state"] == RUNNING:
                seen.board.ranks[rank]["state"] = LOST

    def _receive(self, control: Connection) -> None:
        rank, inbox = self._inboxes[control]
        try:
            if (report := inbox.read()) is not None:
                self._seen.reports[rank] = report
        except MemoryError:
            text = result_too_large(inbox.expected_bytes)
            raise WorkerError(f"rank {rank}: {text}", rank=rank) from None
        except EOFError:
            del self._inboxes[control]
            control.close()

    def _stuck_ranks(self) -> list[int]:
        """The ranks that can never continue: found stuck twice, with no progress in between."""
        if time.monotonic() - self._looked_s < _POLL_S:
            return []
        self._looked_s = time.monotonic()
        ticks = self._seen.board.ticks()
        now = stuck_ranks(self._seen.board.copy()), ticks
        before, self._stuck = self._stuck, now
        return now[0] if now == before else []

    def _stacks(self) -> dict[int, str]:
        """Ask the running ranks for their stacks, and collect those that arrive in time."""
        self._output.flush()
        rows = self._seen.board.ranks
        asked = [
            rank
            for rank, pid in self.pids.items()
            if rank not in self.exit_codes and not is_stopped(pid)
            # Before it has written its number, it does not listen to the signal.
            if rows["pid"][rank] and rows["state"][rank] not in (RETURNED, LOST)
        ]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        until_s = time.monotonic() + _STACKS_S
        while asked and time.monotonic() < until_s:
            self._read(_POLL_S)
        return {rank: self._output.take_pending(rank) for rank in asked}

    def _let_go(self) -> None:
        """Let the ranks clean up and exit by themselves, within a limited time."""
        for control in self._inboxes:
            with contextlib.suppress(OSError):
                os.write(control.fileno(), GO)
        until_s = time.monotonic() + _LEAVE_PATIENCE_S
        while len(self.exit_codes) < self.job.world_size and time.monotonic() < until_s:
            self._read(_POLL_S)

    def _end(self) -> None:
        """Leave nothing behind: end and join processes, show the last output, close the pipes."""
        for _ in range(2):
            try:
                self._end_ranks()
                break
            except KeyboardInterrupt:
                # All ranks were sent SIGKILL before the first wait, so none survives even if a
                # second Ctrl-C cuts the second attempt short.
                continue
        for _ in range(100):
            if not (found := wait(self._output.connections, 0)):
                break
            self._output.read(found)
        if self._watcher is not None:
            reports, failed = self._seen.reports, self._seen.failures
            has_all = len({*reports, *self._seen.lost}) == self.job.world_size
            self._watcher.close(trace_of(reports.values()) if has_all and not failed else None)
        self._output.flush()
        self._output.close()
        for end in (*self._inboxes, *(end for pair in self._rank_ends for end in pair)):
            end.close()
        # The traceback of an error keeps this object alive; it must not keep the shared memory.
        del self._seen.board, self._watcher
        self._arena.close()
        self._meeting.close()

    def _end_ranks(self) -> None:
        """Kill the ranks that are left, and wait a limited time until they have ended."""
        self._ends.set()
        until_s = time.monotonic() + _END_PATIENCE_S
        self._kill()
        # An interrupt of ``Thread.start`` can leave a thread that is about to run.
        while time.monotonic() < (until_s if self._starter.ident else self._launched_s + 1):
            if self._has_started.wait(_POLL_S):
                break
            self._kill()
        self._kill()
        for rank, process in enumerate(self._processes):
            process.join(max(0.0, until_s - time.monotonic()))
            # If the forkserver has ended, only the system knows when the rank has.
            while is_running(self.pids[rank]) and time.monotonic() < until_s:
                time.sleep(0.001)

    def _kill(self) -> None:
        for rank, pid in self.pids.items():
            if rank not in self.exit_codes:
                kill_group(pid)
            else:
                # The processes that it has started.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
