"""Watching one run from outside, and ending it whole, whatever happens.

The supervisor reads what the ranks report and print, finds ranks that are gone or stuck, passes
the deadline and the stop button on, and turns every ending into a result or into one error that
explains.
"""

import contextlib
import os
import signal
import time
from multiprocessing.connection import Connection, Pipe, wait

from labkit.comm.board import LOST, RETURNED, RUNNING, Board
from labkit.comm.deadlock import stuck_ranks, takes_part
from labkit.comm.explain import explain_deadlock
from labkit.comm.processes import is_running, is_stopped, kill_group, signal_name
from labkit.comm.shared_memory import Arena
from labkit.comm.source_lines import learner_frames, readable
from labkit.errors import DeadlineError, DeadlockError, WorkerError
from labkit.runtime.agent import Agent
from labkit.runtime.file_store import MeetingFile
from labkit.runtime.messages import Inbox, Report, let_go
from labkit.runtime.output import Output
from labkit.runtime.preload import end_stopped_server, server_fault, warm_up
from labkit.runtime.progress import ProgressBar

_POLL_S = 0.05
# After a first sign of failure: time for the ranks' own reports and exit codes to come in.
_SETTLE_S = 0.5
_EXIT_CODE_S = 0.6
_START_PATIENCE_S = 120.0
# How long a start may take before the server of ranks is looked at.
_SERVER_PATIENCE_S = 1.0
_ABORT_PATIENCE_S = 5.0
# For ranks that have returned to tidy up by themselves, and for killed ones to be gone.
_LEAVE_PATIENCE_S = 3.0
_END_PATIENCE_S = 10.0


class Supervisor:
    """Watches one run from outside and ends it whole."""

    def __init__(
        self, job, world_size: int, timeout_s: float, may_lose: frozenset[int] = frozenset()
    ):
        from labkit.runtime.worker import run_rank

        self.world_size = world_size
        self.timeout_s = timeout_s
        self.may_lose = may_lose
        self.arena = arena = Arena(world_size)
        self.board = arena.board
        self.meeting = MeetingFile()
        controls = [Pipe() for _ in range(world_size)]
        outputs = [Pipe(duplex=False) for _ in range(world_size)]
        self.inboxes = {mine: (rank, Inbox(mine)) for rank, (mine, _) in enumerate(controls)}
        self.output = Output([receiver for receiver, _ in outputs])
        self.bar = ProgressBar(self.board)
        self._ranks_ends = [
            (control, output) for (_, control), (_, output) in zip(controls, outputs)
        ]
        self.agent = Agent(run_rank, self._ranks_ends, (job, arena, self.meeting))
        self.reports: dict[int, Report] = {}
        self.gone: set[int] = set()
        self.lost: dict[int, str] = {}
        self.launched_s = time.monotonic()
        self.started_s: float | None = None
        self._error_s: float | None = None
        self._looked_s = 0.0
        self._ticks: tuple[int, ...] = ()
        self._stuck: list[int] = []

    def run(self) -> list[Report | None]:
        """Start the ranks, wait for all of them, and return their reports in rank order.

        A rank in ``may_lose`` that ended early has None, and ``lost`` says why.

        Raises:
            WorkerError: or one of its kinds, when the run failed.
        """
        try:
            # An interrupt can come between any two of these: whatever has started must end.
            warm_up()
            self.agent.start()
            verdict = self._watch()
            self.lost = {rank: self._why_lost(rank) for rank in sorted(self._lost())}
            if verdict is None:
                self._let_go()
        finally:
            self._end()
        if verdict is not None:
            raise verdict
        ranks = range(self.world_size)
        return [None if rank in self.lost else self.reports[rank] for rank in ranks]

    def _lost(self) -> set[int]:
        """The ranks that have ended early and that the run does without."""
        raised = {rank for rank, report in self.reports.items() if report.kind != "value"}
        return self.may_lose & (raised | (self.gone - self.reports.keys()))

    def _why_lost(self, rank: int) -> str:
        if rank not in self.reports:
            return self._how_it_left(rank)
        report = self.reports[rank]
        where = f" at {readable(report.location)}" if report.location else ""
        return f"{readable(report.summary)}{where}"

    def _watch(self) -> WorkerError | None:
        """Until every rank has returned (None), or the run has failed (the error to raise)."""
        failed_s: float | None = None
        while True:
            self._read(_POLL_S)
            self.output.show({*self.reports, *self.gone})
            self.bar.update()
            now_s = time.monotonic()
            lost = self._lost()
            bad = [r for r in self.reports.values() if r.kind != "value" and r.rank not in lost]
            if not bad and len({*self.reports, *lost}) == self.world_size:
                return None
            if why := self._why_not_started(now_s):
                return WorkerError(f"the ranks could not be started: {why}")
            if self.agent.error is not None:
                # Whatever else is seen now follows from it.
                continue
            if self.started_s is None and self._all_started():
                self.started_s = now_s
            if bad or self._missing():
                failed_s = failed_s or now_s
                if self._settled(bad, now_s - failed_s):
                    return self._failure(bad)
            elif stuck := self._check_stuck():
                return self._deadlock(stuck)
            if now_s > self._deadline_s():
                return self._deadline()

    def _missing(self) -> set[int]:
        """The ranks that have ended, and that others may still need."""
        return self.gone - self.may_lose

    def _read(self, timeout_s: float) -> None:
        """Take in what the ranks have sent, and who has ended."""
        ended = self.agent.exit_codes
        sources = wait([*self.inboxes, *self.output.connections], timeout_s)
        for ready in sources:
            if ready in self.inboxes:
                self._read_report(ready)
            else:
                self.output.read(ready)
        # The pipe of an ended rank stays open if a process that it has forked holds it.
        silent = {rank for control, (rank, _) in self.inboxes.items() if control not in sources}
        self.gone |= silent & ended.keys()
        for rank in self._lost():
            if self.board.ranks[rank]["state"] == RUNNING:
                self.board.ranks[rank]["state"] = LOST

    def _read_report(self, control: Connection) -> None:
        rank, inbox = self.inboxes[control]
        try:
            if report := inbox.read():
                self.reports[rank] = report
        except EOFError:
            del self.inboxes[control]
            control.close()
            self.gone.add(rank)

    def _all_started(self) -> bool:
        return all(map(self._has_started, range(self.world_size)))

    def _has_started(self, rank: int) -> bool:
        # One that is stopped at once has not yet said that it is there.
        pid = self.agent.pids.get(rank)
        there = self.board.ranks[rank]["pid"] or rank in self.agent.exit_codes
        return bool(there or (pid and is_stopped(pid)))

    def _why_not_started(self, now_s: float) -> str:
        """Why some rank never will; empty while all may."""
        if (error := self.agent.error) is not None:
            self._error_s = self._error_s or now_s
            # A server that aborts takes a while to have ended.
            broke_off = isinstance(error, EOFError | OSError)
            if broke_off and now_s - self._error_s < _ABORT_PATIENCE_S:
                return server_fault()
            return server_fault() or f"{type(error).__name__}: {error}"
        is_late = self.started_s is None and now_s - self.launched_s > _SERVER_PATIENCE_S
        return fault if is_late and "is stopped" in (fault := server_fault()) else ""

    def _settled(self, bad: list, waited_s: float) -> bool:
        kinds = {report.kind for report in bad} - {"peer_lost"}
        if kinds == {"exited"}:
            # Whoever needs that rank will be waiting for it in a moment, and can be named then.
            return waited_s > _SETTLE_S
        if kinds:
            return True
        if missing := self._missing():
            return missing <= self.agent.exit_codes.keys() or waited_s > _EXIT_CODE_S
        return waited_s > _SETTLE_S

    def _check_stuck(self) -> list[int]:
        """Ranks that can never go on, seen twice with nothing moved in between."""
        if time.monotonic() - self._looked_s < _POLL_S:
            return []
        self._looked_s = time.monotonic()
        ticks = self.board.ticks()
        stuck = stuck_ranks(self.board.copy())
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
        """The ranks that have ended, who was seen to end first before the others."""
        order = list(self.agent.exit_codes)
        return sorted(
            self._missing(), key=lambda rank: order.index(rank) if rank in order else len(order)
        )

    def _how_it_left(self, rank: int) -> str:
        code, state = self.agent.exit_codes.get(rank), self.board.ranks[rank]["state"]
        when = "in mid-run" if state else "before it had started"
        if state == RETURNED:
            when = "after its function had returned"
        if code is None:
            why = server_fault() or "its exit code has not come"
            return f"has ended {when}; how is not known: {why}"
        if code == 1 and not state:
            return (
                "ended before it had started: in a script, labkit.run has to stand under "
                'if __name__ == "__main__":'
            )
        if code >= 0:
            when = when if state == RETURNED else "before its function had returned"
            return f"left early with exit code {code}, {when}"
        name = signal_name(-code)
        hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
        return f"was killed by {name} {when}{hint}"

    def _waiting_for(self, rank: int) -> str:
        board = self.board.copy()
        sentences = []
        for other in range(self.world_size):
            slot = board.ranks[other]
            op = slot["op"].decode()
            if other != rank and takes_part(board, other, rank):
                where = readable(slot["location"].decode())
                sentences.append(f" Rank {other} was waiting for it in {op} at {where}.")
        return "".join(sentences)

    def _raised(self, report) -> WorkerError:
        where = readable(report.location)
        trace = readable(report.traceback, quote=False)
        if report.kind == "mismatch":
            return DeadlockError(readable(report.summary), rank=report.rank, location=where)
        message, kind = f"rank {report.rank} {report.summary}", WorkerError
        if report.kind == "exited" and (waiting := self._waiting_for(report.rank)):
            message, kind = f"{message}.{waiting}", DeadlockError
        if where:
            message += f"\n  at {where}"
        for rank in sorted(self._lost()):
            message += f"\n  before that rank {rank} {self._why_lost(rank)}"
        if report.kind == "raised":
            message += f"\n\nTraceback of rank {report.rank}:\n{trace.rstrip()}"
        return kind(message, rank=report.rank, location=where, worker_traceback=trace)

    def _deadlock(self, stuck: list[int]) -> DeadlockError:
        board = self.board.copy()
        where = readable(board.ranks[stuck[0]]["location"].decode())
        return DeadlockError(
            readable(explain_deadlock(board, stuck)), rank=stuck[0], location=where
        )

    def _deadline_s(self) -> float:
        # The first run of a process waits for the server to import torch: not the run's time.
        if self.started_s is None:
            return self.launched_s + self.timeout_s + _START_PATIENCE_S
        return self.started_s + self.timeout_s

    def _deadline(self) -> DeadlineError:
        board = self.board.copy()
        lines = [f"the run was still going at its deadline of {self.timeout_s:g} s (timeout_s)."]
        stopped = [rank for rank, pid in self.agent.pids.items() if is_stopped(pid)]
        for rank, stack in sorted(self._stacks(stopped).items()):
            lines.append(f"rank {rank} {self._doing(board, rank, stack)}")
        lines += [
            f"rank {rank} is stopped by a signal (SIGSTOP, or Ctrl-Z): kill -CONT "
            f"{self.agent.pids[rank]} would have let it go on."
            for rank in stopped
        ]
        returned = [r for r in range(self.world_size) if board.ranks[r]["state"] == RETURNED]
        if returned:
            lines.append(f"ranks that had returned: {returned}.")
        lines += [f"rank {rank} {self._why_lost(rank)}." for rank in sorted(self._lost())]
        if fault := server_fault():
            lines.append(f"{fault}.")
        elif not stopped:
            lines.append(
                "Next step: look for a loop without an end, or give the run more timeout_s."
            )
        return DeadlineError("\n".join(lines))

    def _doing(self, board: Board, rank: int, stack: str) -> str:
        if not board.ranks[rank]["state"]:
            return "had not started yet."
        op = board.ranks[rank]["op"].decode()
        doing = f"was in {op}" if op else "was in its own code"
        where = readable(learner_frames(stack))
        return f"{doing}:\n{where}" if where else f"{doing}; it did not tell where."

    def _stacks(self, silent: list[int]) -> dict[int, str]:
        """Ask each running rank for its stack, and collect what comes within half a second."""
        self.output.flush()
        done = {rank for rank in range(self.world_size) if self._is_done(rank)} | set(silent)
        asked = [rank for rank in range(self.world_size) if rank not in done]
        for rank in asked:
            self._signal(rank, signal.SIGUSR1)
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            self._read(0.05)
        return {rank: self.output.take_pending(rank) for rank in asked}

    def _is_done(self, rank: int) -> bool:
        return self.board.ranks[rank]["state"] in (RETURNED, LOST)

    def _signal(self, rank: int, number: int) -> None:
        pid = int(self.board.ranks[rank]["pid"])
        # Of a process that has ended the system may have given its number to another.
        if pid and rank not in self.gone | self._lost():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _let_go(self) -> None:
        """Let the ranks end by themselves, in a moment: what they hold is theirs to tidy up."""
        for control in self.inboxes:
            with contextlib.suppress(OSError):
                let_go(control)
        until_s = time.monotonic() + _LEAVE_PATIENCE_S
        while self.inboxes and time.monotonic() < until_s:
            self._read(_POLL_S)
            if not any(map(is_running, self.agent.pids.values())):
                break

    def _end(self) -> None:
        """Leave nothing: processes ended and joined, pipes closed, the last output shown."""
        for _ in range(2):
            try:
                self._end_ranks()
                break
            except KeyboardInterrupt:
                # All were sent SIGKILL before the first wait; after a second Ctrl-C none is left.
                continue
        self._show_the_rest()
        for end in (*self.inboxes, *(end for pair in self._ranks_ends for end in pair)):
            end.close()
        # An error keeps this object as long as itself: the memory must not stay with it.
        self.board = self.bar = None
        self.arena.close()
        self.meeting.close()

    def _end_ranks(self) -> None:
        """Kill what is left, and wait for it, but not without bound."""
        self.agent.stop()
        until_s = time.monotonic() + _END_PATIENCE_S
        while self.agent.may_start_ranks() and time.monotonic() < until_s:
            for rank, pid in self.agent.pids.items():
                if rank not in self.agent.exit_codes:
                    kill_group(pid)
            if self.agent.finished.wait(_POLL_S):
                break
            # A server that is stopped would never say that a rank is gone.
            end_stopped_server()

    def _show_the_rest(self) -> None:
        for _ in range(100):
            if not self.output.connections or not (found := wait(self.output.connections, 0)):
                break
            for ready in found:
                self.output.read(ready)
        self.bar.close()
        self.output.flush()
        self.output.close()
