"""Watching a run from outside, and ending it completely, whatever happens.

The supervisor reads what the ranks report and print, finds ranks that are gone or stuck, enforces
the deadline, and leaves no process behind. ``labkit.runtime.failures`` makes an error of what the
supervisor has seen.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait

from labkit.comm.board import LOST, RETURNED, RUNNING, Board
from labkit.comm.deadlock import stuck_ranks
from labkit.comm.mismatch import find_mismatch
from labkit.comm.shared_memory import Arena
from labkit.errors import WorkerError
from labkit.runtime.agent import Agent
from labkit.runtime.connect import MeetingFile
from labkit.runtime.failures import (
    Evidence,
    deadline_error,
    deadlock_error,
    failure_error,
    mismatch_error,
    stopped_note,
)
from labkit.runtime.messages import Inbox, Report, Shown, let_go, trace_of
from labkit.runtime.output import Output
from labkit.runtime.shortages import remove_empty_segments, result_too_large
from labkit.runtime.start_ranks import Ranks
from labkit.runtime.watch import Nothing, Watcher, watcher
from labkit.runtime.worker import Job, run_rank
from labkit.trace import Trace

# Makes the agent from the job, the ranks' ends of their pipes, and the status board.
Elsewhere = Callable[[Job, list[tuple[Connection, Connection]], Board], Agent]

_POLL_S = 0.05
# Time for another rank to wait for one that has exited.
_EXITED_S = 0.5
_EXIT_CODE_S = 0.6
_STACKS_S = 0.5
_START_PATIENCE_S = 120.0
# How long a start may take before the forkserver is checked.
_SERVER_PATIENCE_S = 1.0
_ABORT_PATIENCE_S = 5.0
# Time for ranks that have returned to clean up and exit, and for killed ranks to disappear.
_LEAVE_PATIENCE_S = 3.0
_END_PATIENCE_S = 10.0


class Supervisor:
    """Watches one run from outside and ends it completely.

    Args:
        job: what every rank runs.
        elsewhere: makes the agent of ranks on other hosts, see ``hosts.launch``; None to run all
            ranks on this machine.

    Attributes:
        lost: {rank: why} for the ranks in ``job.may_lose`` that ended early; set by ``run``.
    """

    def __init__(self, job: Job, elsewhere: Elsewhere | None = None):
        self.job = job
        self.world_size = job.world_size
        self.lost: dict[int, str] = {}
        self._arena = Arena(self.world_size)
        self._meeting = MeetingFile()
        controls = [Pipe() for _ in range(self.world_size)]
        outputs = [Pipe(duplex=False) for _ in range(self.world_size)]
        here = elsewhere is None
        self._inboxes = {mine: (r, Inbox(mine, here)) for r, (mine, _) in enumerate(controls)}
        self._output = Output([receiver for receiver, _ in outputs])
        self._watcher: Watcher = Nothing()
        self._rank_ends = [(control, out) for (_, control), (_, out) in zip(controls, outputs)]
        self.agent: Agent
        if elsewhere is not None:
            self.agent = elsewhere(job, self._rank_ends, self._arena.board)
        else:
            self.agent = Ranks(run_rank, self._rank_ends, (job, self._arena, self._meeting))
        self._seen = Evidence(self._arena.board, job.may_lose, self.agent)
        self._made_s, self._launched_s = time.time(), time.monotonic()
        self._started_s: float | None = None
        self._error_s: float | None = None
        self._looked_s = 0.0
        self._ticks: tuple[int, ...] = ()
        self._looks: Mapping[int, int] = {}
        self._stuck: list[int] = []

    def run(self) -> list[Report | None]:
        """Start the ranks, wait for all of them, and return their reports in rank order.

        The report of a rank in ``job.may_lose`` that ended early is None, and ``lost`` says why.

        Raises:
            WorkerError: or a subclass of it, if the run has failed.
            KeyboardInterrupt: the caller was interrupted; a note says what each rank was doing.
        """
        try:
            # An interrupt can come between any two of these calls: whatever has started must end.
            self.agent.warm_up()
            # The first one's imports take their time while the forkserver does its own.
            self._watcher = watcher(self._seen.board)
            self.agent.start()
            verdict = self._watch()
            self.lost = {rank: self._seen.why_lost(rank) for rank in sorted(self._seen.lost)}
            if verdict is None:
                self._let_go()
        except KeyboardInterrupt as stop:
            seen = replace(self._seen, board=self._seen.board.copy())
            stop.add_note(stopped_note(seen, self._stacks([])))
            raise
        finally:
            self._end()
        if verdict is not None:
            # The clock of files lags by some milliseconds.
            remove_empty_segments(self._made_s - 0.1)
            raise verdict
        ranks = range(self.world_size)
        return [None if rank in self.lost else self._seen.reports[rank] for rank in ranks]

    def _watch(self) -> WorkerError | None:
        """Watch until all ranks have returned (None) or the run has failed (an error to raise)."""
        seen = self._seen
        failed_s: float | None = None
        while True:
            self._read(_POLL_S)
            self._output.show({*seen.reports, *seen.gone})
            self._watcher.update(self._output.bars)
            now_s = time.monotonic()
            failed = bool(seen.failures)
            if not failed and len({*seen.reports, *seen.lost}) == self.world_size:
                return None
            if why := self._why_not_started(now_s):
                return WorkerError(f"the ranks could not be started: {why}")
            if self.agent.error is not None:
                # Everything else that is seen now is a consequence of this error.
                continue
            if self._started_s is None and all(map(self._has_started, seen.ranks)):
                self._started_s = now_s
            if failed or seen.missing:
                failed_s = failed_s or now_s
                if self._settled(now_s - failed_s):
                    return failure_error(seen)
            elif stuck := self._check_stuck():
                return deadlock_error(seen, stuck)
            elif self.agent.looks() and (mismatch := find_mismatch(seen.board.copy())):
                return mismatch_error(seen, mismatch)
            if now_s > self._deadline_s():
                return self._deadline_error()

    def _read(self, timeout_s: float) -> None:
        """Read what the ranks have sent, and note which ranks have ended."""
        seen = self._seen
        ended = self.agent.exit_codes
        sources = set(wait([*self._inboxes, *self._output.connections], timeout_s))
        for control in [control for control in self._inboxes if control in sources]:
            self._read_report(control)
        self._output.read(sources)
        seen.exit_codes, seen.pids = self.agent.exit_codes, self.agent.pids
        # The pipe of a rank that has ended stays open if a process forked by the rank holds it.
        silent = {rank for control, (rank, _) in self._inboxes.items() if control not in sources}
        seen.gone |= silent & ended.keys()
        self.agent.lose(lost := seen.lost)
        for rank in lost:
            if seen.board.ranks[rank]["state"] == RUNNING:
                seen.board.ranks[rank]["state"] = LOST

    def _read_report(self, control: Connection) -> None:
        rank, inbox = self._inboxes[control]
        try:
            for message in inbox.read():
                if isinstance(message, Shown):
                    self._output.take(message)
                else:
                    self._seen.reports[rank] = message
        except MemoryError:
            told = result_too_large(inbox.expected_bytes)
            raise WorkerError(f"rank {rank}: {told}", rank=rank) from None
        except EOFError:
            del self._inboxes[control]
            control.close()
            self._seen.gone.add(rank)

    def _has_started(self, rank: int) -> bool:
        # A rank that a signal stops right after its start has not written its pid to the board.
        there = self._seen.board.ranks[rank]["pid"] or rank in self._seen.exit_codes
        return bool(there or self.agent.is_stopped(rank))

    def _why_not_started(self, now_s: float) -> str:
        """Why some rank will never start; empty while all ranks still may."""
        if (error := self.agent.error) is not None:
            self._error_s = self._error_s or now_s
            # A server that aborts takes some time until it has ended.
            broke_off = isinstance(error, EOFError | OSError)
            if broke_off and now_s - self._error_s < _ABORT_PATIENCE_S:
                return self.agent.fault()
            return self.agent.fault() or f"{type(error).__name__}: {error}"
        is_late = self._started_s is None and now_s - self._launched_s > _SERVER_PATIENCE_S
        return fault if is_late and "is stopped" in (fault := self.agent.fault()) else ""

    def _settled(self, waited_s: float) -> bool:
        """Whether the cause of a failure is known, or has been waited for long enough."""
        kinds = {report.kind for report in self._seen.failures} - {"peer_lost"}
        if kinds == {"exited"}:
            # A rank that needs the one that exited will soon wait for it, and can then be named.
            return waited_s > _EXITED_S
        if kinds:
            return True
        if missing := self._seen.missing:
            return missing <= self._seen.exit_codes.keys() or waited_s > _EXIT_CODE_S
        return waited_s > self.agent.settle_s

    def _check_stuck(self) -> list[int]:
        """The ranks that can never continue: found stuck twice, with no progress in between."""
        if time.monotonic() - self._looked_s < _POLL_S:
            return []
        self._looked_s = time.monotonic()
        looks, ticks = self.agent.looks(), self._seen.board.ticks()
        stuck = stuck_ranks(self._seen.board.copy())
        still = stuck and stuck == self._stuck and ticks == self._ticks
        # What arrives next from a host may have been on its way when the others were seen.
        if still and any(count < self._looks[host] + 2 for host, count in looks.items()):
            return []
        self._looks, self._ticks, self._stuck = looks, ticks, stuck
        return stuck if still else []

    def _deadline_s(self) -> float:
        # In the first run of a process the server imports torch; this does not count as run time.
        if self._started_s is None:
            return self._launched_s + self.job.timeout_s + _START_PATIENCE_S
        return self._started_s + self.job.timeout_s

    def _deadline_error(self) -> WorkerError:
        # A copy, because the error describes the ranks before they are asked for their stacks.
        seen = replace(self._seen, board=self._seen.board.copy(whole=True))
        stopped = [rank for rank in seen.pids if self.agent.is_stopped(rank)]
        return deadline_error(seen, self.job.timeout_s, self._stacks(stopped), stopped)

    def _stacks(self, silent: list[int]) -> dict[int, str]:
        """Ask the running ranks for their stacks, and collect those that arrive in time."""
        self._output.flush()
        states, over = self._seen.board.ranks["state"], (RETURNED, LOST)
        asked = [r for r in self._seen.ranks if r not in silent and states[r] not in over]
        for rank in asked:
            self._signal(rank, signal.SIGUSR1)
        until_s = time.monotonic() + _STACKS_S
        while asked and time.monotonic() < until_s:
            self._read(_POLL_S)
        return {rank: self._output.take_pending(rank) for rank in asked}

    def _signal(self, rank: int, number: int) -> None:
        # The system may have given the pid of a process that has ended to another process.
        has_ended = rank in self._seen.gone | self._seen.lost
        if self._seen.board.ranks[rank]["pid"] and not has_ended:
            self.agent.send_signal(rank, number)

    def _let_go(self) -> None:
        """Let the ranks clean up and exit by themselves, within a limited time."""
        for control in self._inboxes:
            with contextlib.suppress(OSError):
                let_go(control)
        until_s = time.monotonic() + _LEAVE_PATIENCE_S
        while self._inboxes and time.monotonic() < until_s:
            self._read(_POLL_S)
            if not self.agent.any_runs():
                break

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
        self._show_the_rest()
        for end in (*self._inboxes, *(end for pair in self._rank_ends for end in pair)):
            end.close()
        # The traceback of an error keeps this object alive; it must not keep the shared memory.
        del self._seen.board, self._watcher
        self._arena.close()
        self._meeting.close()

    def _end_ranks(self) -> None:
        """Kill the ranks that are left, and wait a limited time until they have ended."""
        self.agent.stop()
        until_s = time.monotonic() + _END_PATIENCE_S
        while self.agent.may_start_ranks() and time.monotonic() < until_s:
            self.agent.kill()
            # What comes from other hosts waits for what has come before it.
            if found := wait(self._output.connections, 0):
                self._output.read(found)
            else:
                self.agent.finished.wait(_POLL_S)

    def _show_the_rest(self) -> None:
        for _ in range(100):
            if not (found := wait(self._output.connections, 0)):
                break
            self._output.read(found)
        self._watcher.close(self._trace())
        self._output.flush()
        self._output.close()

    def _trace(self) -> Trace | None:
        """The spans of all ranks that have returned; None if the run has failed."""
        reports = self._seen.reports
        if self._seen.failures or len({*reports, *self._seen.lost}) < self.world_size:
            return None
        return trace_of(reports.values())
