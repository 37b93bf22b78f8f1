"""How a rank's failure becomes a WorkerError.

In the rank, an exception becomes a report. In the launcher, reports, exit codes and the status
board together become one error that names the cause, not its consequences.
"""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.comm.board import LOST, NOT_STARTED, RETURNED, Board
from labkit.comm.deadlock import explain_deadlock, explain_rank, takes_part, waits_in
from labkit.comm.processes import is_stopped, signal_name
from labkit.comm.source_lines import (
    innermost_location,
    is_internal,
    is_ours,
    learner_frames,
    readable,
)
from labkit.comm.torch_transport import means_loss
from labkit.errors import DeadlineError, DeadlockError, MismatchError, PeerLostError, WorkerError
from labkit.runtime.messages import Report, described, shortened
from labkit.runtime.pickling import UnpicklableError
from labkit.runtime.shortages import explained, hint_of


def report_of_failure(rank: int, error: BaseException) -> Report:
    """In the rank: the report that tells the launcher about an exception."""
    if isinstance(error, SystemExit):
        code = repr(error.code) if isinstance(error.code, int | str | None) else described(error)
        kind = "exited"
        summary = f"called sys.exit({shortened(code)}) before its function had returned"
    elif isinstance(error, MismatchError):
        kind, summary = "mismatch", str(error)
    elif isinstance(error, UnpicklableError):
        kind, summary = "unpicklable", f"has a result that cannot be sent back: {error}"
    else:
        # Where PyTorch uses gloo or NCCL without labkit, a lost peer is a RuntimeError.
        is_lost_peer = isinstance(error, PeerLostError)
        is_lost_peer |= isinstance(error, RuntimeError) and means_loss(error)
        text = explained(error, described(error))
        kind = "peer_lost" if is_lost_peer else "raised"
        summary = f"raised {type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_internal(frame.filename)]
    location = f'"{own[-1].filename}", line {own[-1].lineno}' if own else ""
    if kind == "raised" and (error.__cause__ is not None or isinstance(error, BaseExceptionGroup)):
        text = "".join(traceback.format_exception(error))
    else:
        # Without labkit's frames before and after those of the learner.
        first, last = 0, len(frames)
        while first < last and is_internal(frames[first].filename):
            first += 1
        while last > first and is_ours(frames[last - 1].filename):
            last -= 1
        text = "".join(traceback.format_list(list(frames[first:last])))
        text += "".join(traceback.format_exception_only(error))
    return Report(rank, kind, summary=summary, location=location, traceback=shortened(text))


@dataclass
class Evidence:
    """In the launcher: what is known so far about the ranks of a run.

    Attributes:
        board: the status board, to which the ranks write.
        may_lose: ranks that the run can do without.
        reports: {rank: report} of the ranks that have sent one.
        exit_codes: {rank: exit code} in the order in which ranks ended; None if unknown.
    """

    board: Board
    may_lose: frozenset[int] = frozenset()
    reports: dict[int, Report] = field(default_factory=dict)
    exit_codes: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def ranks(self) -> range:
        return range(self.board.world_size)

    @property
    def lost(self) -> frozenset[int]:
        """The ranks that have ended early, and without which the run continues."""
        failed = {rank for rank, report in self.reports.items() if report.kind != "value"}
        return self.may_lose & (failed | (self.exit_codes.keys() - self.reports.keys()))

    @property
    def missing(self) -> list[int]:
        """The ranks that have ended, and are needed, but for their report of a failure."""
        failed = {report.rank for report in self.failures}
        return [rank for rank in self.exit_codes if rank not in self.may_lose | failed]

    @property
    def failures(self) -> list[Report]:
        """The reports of ranks that have failed, and that the run cannot do without."""
        lost = self.lost
        return [r for r in self.reports.values() if r.kind != "value" and r.rank not in lost]

    def why_lost(self, rank: int) -> str:
        """Why a rank was lost: ``raised ValueError: ... at Cell In[3], line 4``, for example."""
        if rank not in self.reports:
            return self.how_it_left(rank)
        report = self.reports[rank]
        where = f" at {readable(report.location)}" if report.location else ""
        return f"{readable(report.summary)}{where}"

    def how_it_left(self, rank: int) -> str:
        """How a rank without a report ended: ``was killed by SIGKILL in mid-run``, for example."""
        code, state = self.exit_codes.get(rank), self.board.ranks[rank]["state"]
        when = "in mid-run" if state else "before it had started"
        if state == RETURNED:
            when = "after its function had returned"
        if code is None:
            return f"has ended {when}"
        if code == 1 and not state:
            return (
                "ended before it had started: in a script, labkit.run has to be called under "
                'if __name__ == "__main__":'
            )
        if code >= 0:
            when = when if state == RETURNED else "before its function had returned"
            return f"left early with exit code {code}, {when}"
        name = signal_name(-code)
        return f"was killed by {name} {when}{hint_of(name)}"

    def who_waited_for(self, rank: int) -> str:
        """A sentence for each other rank that was in an operation with ``rank``."""
        board = self.board.copy()
        sentences = []
        for other in self.ranks:
            if other != rank and takes_part(board, other, rank):
                op, where = waits_in(board, other)
                where = readable(where)
                sentences.append(f" Rank {other} was waiting for it in {op} at {where}.")
        return "".join(sentences)


def failure_error(seen: Evidence) -> WorkerError:
    """The error for ranks that have raised or ended; it names the cause, not its consequences."""
    causes = [report for report in seen.failures if report.kind != "peer_lost"]
    if not causes and (missing := seen.missing):
        how, waiting = seen.how_it_left(missing[0]), seen.who_waited_for(missing[0])
        kind = DeadlockError if waiting and "exit code 0" in how else WorkerError
        text = f"rank {missing[0]} {how}.{waiting} The other ranks were ended."
        return kind(text, rank=missing[0])
    report = (causes or seen.failures)[0]
    where = readable(report.location)
    if report.kind == "mismatch":
        return DeadlockError(readable(report.summary), rank=report.rank, location=where)
    message, kind = f"rank {report.rank} {report.summary}", WorkerError
    if report.kind == "exited" and (waiting := seen.who_waited_for(report.rank)):
        message, kind = f"{message}.{waiting}", DeadlockError
    if where:
        message += f"\n  at {where}"
    for rank in sorted(seen.lost):
        message += f"\n  before that, rank {rank} {seen.why_lost(rank)}"
    trace = readable(report.traceback, quote=False)
    if report.kind == "raised":
        message += f"\n\nTraceback of rank {report.rank}:\n{trace.rstrip()}"
    return kind(message, rank=report.rank, location=where, worker_traceback=trace)


def deadlock_error(board: Board, stuck: list[int]) -> DeadlockError:
    """The error for ranks that can never continue."""
    board = board.copy()
    where = readable(waits_in(board, stuck[0])[1])
    return DeadlockError(readable(explain_deadlock(board, stuck)), rank=stuck[0], location=where)


def deadline_error(
    seen: Evidence, timeout_s: float, stacks: Mapping[int, str], pids: Mapping[int, int]
) -> DeadlineError:
    """The error for a run that was still going at its deadline.

    Args:
        seen: what is known about the ranks; its board as before they were asked for their stacks.
        timeout_s: the deadline, in seconds.
        stacks: {rank: stack dump} of the running ranks.
        pids: {rank: process id}.
    """
    lines = [f"the run was still going at its deadline of {timeout_s:g} s (timeout_s)."]
    stopped = False
    for rank, slot in enumerate(seen.board.ranks):
        if rank in pids and is_stopped(pids[rank]):
            stopped = True
            lines.append(
                f"rank {rank} is stopped by a signal (SIGSTOP, or Ctrl-Z): kill -CONT "
                f"{pids[rank]} would have let it continue."
            )
        elif rank in seen.lost:
            lines.append(f"rank {rank} {seen.why_lost(rank)}.")
        elif slot["state"] in (NOT_STARTED, RETURNED):
            has = "had not started yet" if slot["state"] == NOT_STARTED else "had returned"
            lines.append(f"rank {rank} {has}.")
        else:
            where = readable(learner_frames(stacks.get(rank, "")))
            where = f":\n{where}" if where else "; it did not report where."
            lines.append(f"rank {rank} was {explain_rank(seen.board, rank)}{where}")
    if not stopped:
        lines.append("Next step: look for an endless loop, or give the run a larger timeout_s.")
    return DeadlineError("\n".join(lines))


def stopped_note(board: Board, stacks: Mapping[int, str]) -> str:
    """What each rank was doing when the caller stopped the run, in one line per rank.

    Args:
        board: as before the ranks were asked for their stacks.
        stacks: {rank: stack dump} of the ranks that were running.
    """
    lines = ["The run was stopped, and all its ranks were ended. What each was doing:"]
    states = {NOT_STARTED: "had not started yet", RETURNED: "had returned", LOST: "was lost"}
    for rank, slot in enumerate(board.ranks):
        doing = states.get(int(slot["state"])) or f"was {explain_rank(board, rank)}"
        _, where = waits_in(board, rank)
        if where := where or innermost_location(stacks.get(rank, "")):
            doing += f", at {readable(where)}"
        lines.append(f"  rank {rank} {doing}")
    return "\n".join(lines)
