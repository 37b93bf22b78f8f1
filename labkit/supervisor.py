"""Watching one run from outside, and ending it whole, whatever happens.

The supervisor reads what the ranks report and print, finds ranks that are gone or stuck, passes
the deadline and the stop button on, and turns every ending into a result or into one error that
explains.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from labkit.board import LOST, RETURNED, RUNNING, explain
from labkit.engine import Agent, check_room, start_method, warm_up
from labkit.errors import DeadlineError, DeadlockError, WorkerError
from labkit.live import Output, ProgressBar
from labkit.shared_memory import Arena
from labkit.sources import learner_frames, readable

_POLL_S = 0.05
# After a first sign of failure: time for the ranks' own reports and exit codes to come in.
_SETTLE_S = 0.5
_EXIT_CODE_S = 0.6
_START_PATIENCE_S = 120.0


class Supervisor:
    """Watches one run from outside and ends it whole."""

    def __init__(
        self, job, world_size: int, timeout_s: float, may_lose: frozenset[int] = frozenset()
    ):
        context = multiprocessing.get_context(start_method())
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.may_lose = may_lose
        self.arena = arena = Arena(world_size)
        self.board = arena.board
        controls = [Pipe(duplex=False) for _ in range(world_size)]
        outputs = [Pipe(duplex=False) for _ in range(world_size)]
        self.agent_done, done = Pipe(duplex=False)
        self.controls = {receiver: rank for rank, (receiver, _) in enumerate(controls)}
        self.output = Output([receiver for receiver, _ in outputs])
        self.bar = ProgressBar(self.board)
        self._workers_ends = [sender for _, sender in (*controls, *outputs)]
        ends = ([sender for _, sender in controls], [sender for _, sender in outputs])
        self.agent = Agent(context, world_size, (job, arena, *ends), done, may_lose)
        self.reports: dict[int, Any] = {}
        self.gone: set[int] = set()
        self.lost: dict[int, str] = {}
        self.launched_s = time.monotonic()
        self.started_s: float | None = None
        self._looked_s = 0.0
        self._ticks: tuple[int, ...] = ()
        self._stuck: list[int] = []

    def run(self) -> list[Any]:
        """Start the ranks, wait for all of them, and return their reports in rank order.

        A rank in ``may_lose`` that ended early has None, and ``lost`` says why.

        Raises:
            WorkerError: or one of its kinds, when the run failed.
        """
        try:
            check_room(self.world_size)
            # An interrupt can come between any two of these: whatever has started must end.
            warm_up()
            self.agent.start()
            verdict = self._watch()
            self.lost = {rank: self._why_lost(rank) for rank in sorted(self._lost())}
        finally:
            self._end()
        if verdict is not None:
            raise verdict
        ranks = range(self.world_size)
        return [None if rank in self.lost else self.reports[rank] for rank in ranks]

    def _lost(self) -> set[int]:
        """The ranks that have ended early and that the run does without."""
        raised = {rank for rank, report in self.reports.items() if report.kind != "value"}
        return self.may_lose & (raised | self.gone)

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
            gone = self.gone - lost
            bad = [r for r in self.reports.values() if r.kind != "value" and r.rank not in lost]
            if not self.agent.is_alive() and not bad and not gone:
                if self.agent.error is not None:
                    raise WorkerError(f"the ranks could not be started: {self.agent.error}")
                if len({*self.reports, *lost}) == self.world_size and not self.agent.failures:
                    return None
            if bad or gone or not self.agent.is_alive():
                failed_s = failed_s or now_s
                if self._settled(bad, now_s - failed_s):
                    return self._failure(bad)
            elif stuck := self._check_stuck():
                return self._deadlock(stuck)
            if self.started_s is None and self._all_started():
                self.started_s = now_s
            if now_s > self._deadline_s():
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

    def _all_started(self) -> bool:
        pids = self.board.ranks["pid"]
        return all(pids[rank] or rank in self.agent.losses for rank in range(self.world_size))

    def _close_own_ends(self) -> None:
        # Once every rank runs, its pipe must end with it: then the copies here must go.
        if self._workers_ends and (self._all_started() or not self.agent.is_alive()):
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
        if rank in self._lost() and self.board.ranks[rank]["state"] == RUNNING:
            self.board.ranks[rank]["state"] = LOST

    def _settled(self, bad: list, waited_s: float) -> bool:
        kinds = {report.kind for report in bad} - {"peer_lost"}
        if kinds == {"exited"}:
            # Whoever needs that rank will be waiting for it in a moment, and can be named then.
            return waited_s > _SETTLE_S
        if kinds:
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
        exitcode = failure.exitcode if failure else self.agent.losses.get(rank, 0)
        if exitcode == 1 and not self.board.ranks[rank]["state"]:
            return (
                "ended before it had started: in a script, labkit.run has to stand under "
                'if __name__ == "__main__":'
            )
        if exitcode >= 0:
            return f"left early with exit code {exitcode}, before its function had returned"
        name = signal.Signals(-exitcode).name
        when = "in mid-run" if self.board.ranks[rank]["state"] else "before it had started"
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
            if other != rank and board.waits_for(other, rank):
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
        return DeadlockError(readable(explain(board, stuck)), rank=stuck[0], location=where)

    def _deadline_s(self) -> float:
        # The first run of a process waits for the server to import torch: not the run's time.
        if self.started_s is None:
            return self.launched_s + self.timeout_s + _START_PATIENCE_S
        return self.started_s + self.timeout_s

    def _deadline(self) -> DeadlineError:
        board = self.board.copy()
        lines = [f"the run was still going at its deadline of {self.timeout_s:g} s (timeout_s)."]
        for rank, stack in sorted(self._stacks().items()):
            if not board.ranks[rank]["state"]:
                lines.append(f"rank {rank} had not started yet.")
                continue
            doing = f"in {op}" if (op := board.ranks[rank]["op"].decode()) else "in its own code"
            lines.append(f"rank {rank} was {doing}:\n{readable(learner_frames(stack))}")
        returned = [r for r in range(self.world_size) if board.ranks[r]["state"] == RETURNED]
        if returned:
            lines.append(f"ranks that had returned: {returned}.")
        lines += [f"rank {rank} {self._why_lost(rank)}." for rank in sorted(self._lost())]
        lines.append("Next step: look for a loop without an end, or give the run more timeout_s.")
        return DeadlineError("\n".join(lines))

    def _stacks(self) -> dict[int, str]:
        """Ask each running rank for its stack, and collect what comes within half a second."""
        self.output.flush()
        ended = (RETURNED, LOST)
        asked = [r for r in range(self.world_size) if self.board.ranks[r]["state"] not in ended]
        for rank in asked:
            self._signal(rank, signal.SIGUSR1)
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            self._read(0.05)
        return {rank: self.output.take_pending(rank) for rank in asked}

    def _signal(self, rank: int, number: int) -> None:
        pid = int(self.board.ranks[rank]["pid"])
        # Of a process that has ended the system may have given its number to another.
        if pid and rank not in self.gone | self._lost():
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
        # An error keeps this object as long as itself: the memory must not stay with it.
        self.board = self.bar = None
        self.arena.close()

    def _end_ranks(self) -> None:
        self.agent.stop()
        while self.agent.may_start_ranks():
            for rank in range(self.world_size):
                if rank not in self.reports or self.reports[rank].kind != "value":
                    self._signal(rank, signal.SIGKILL)
            self.agent.finished.wait(0.1)
