"""How a rank's failure becomes a WorkerError.

In the rank, an exception becomes a report. In the launcher, reports, exit codes and the status
board together become one error that names the cause, not its consequences.
"""

import bdb
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit import units
from labkit.comm.board import LOST, NOT_STARTED, RETURNED, Board
from labkit.comm.deadlock import takes_part
from labkit.comm.explain import explain_deadlock, explain_queues, explain_rank, waits_in
from labkit.comm.processes import signal_name
from labkit.comm.source_lines import (
    innermost_location,
    is_internal,
    is_ours,
    learner_frames,
    readable,
)
from labkit.comm.torch_transport import means_loss
from labkit.errors import DeadlineError, DeadlockError, MismatchError, PeerLostError, WorkerError
from labkit.runtime.agent import Agent
from labkit.runtime.messages import Report, described, shortened
from labkit.runtime.pickling import UnpicklableError
from labkit.runtime.prepare import NO_DEBUGGER
from labkit.runtime.shortages import explained, hint_of


def report_of_failure(rank: int, error: BaseException) -> Report:
    """In the rank: the report that tells the launcher about an exception."""
    kind, summary = _kind_and_summary(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_internal(frame.filename)]
    location = f'"{own[-1].filename}", line {own[-1].lineno}' if own else ""
    text = "".join(traceback.format_list(_learner_part(frames)))
    text += "".join(traceback.format_exception_only(error))
    if kind == "raised" and (error.__cause__ is not None or isinstance(error, BaseExceptionGroup)):
        text = "".join(traceback.format_exception(error))
    return Report(rank, kind, summary=summary, location=location, traceback=shortened(text))


def _kind_and_summary(error: BaseException) -> tuple[str, str]:
    if isinstance(error, SystemExit):
        code = repr(error.code) if isinstance(error.code, int | str | None) else described(error)
        return "exited", f"called sys.exit({shortened(code)}) before its function had returned"
    if isinstance(error, MismatchError):
        return "mismatch", str(error)
    if isinstance(error, UnpicklableError):
        return "unpicklable", f"has a result that cannot be sent back: {error}"
    text = NO_DEBUGGER if isinstance(error, bdb.BdbQuit) else explained(error, described(error))
    summary = f"raised {type(error).__name__}: {text}{units.spelling(error)}"
    # Where PyTorch uses gloo or NCCL without labkit, a lost peer is a RuntimeError.
    is_lost_peer = isinstance(error, PeerLostError)
    is_lost_peer |= isinstance(error, RuntimeError) and means_loss(error)
    return ("peer_lost" if is_lost_peer else "raised"), summary


def _learner_part(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames of the learner's code, without labkit's own frames before and after them."""
    first, last = 0, len(frames)
    while first < last and is_internal(frames[first].filename):
        first += 1
    while last > first and is_ours(frames[last - 1].filename):
        last -= 1
    return list(frames[first:last])


@dataclass
class Evidence:
    """In the launcher: what is known so far about the ranks of a run.

    Attributes:
        board: the status board, to which the ranks write.
        may_lose: ranks that the run can do without.
        agent: what has started the ranks.
        pids: {rank: process id} of the ranks that were started.
        reports: {rank: report} of the ranks that have sent one.
        exit_codes: {rank: exit code} in the order in which ranks ended; None if unknown.
        gone: ranks that have ended, or closed their pipe.
    """

    board: Board
    may_lose: frozenset[int]
    agent: Agent
    pids: Mapping[int, int] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    exit_codes: Mapping[int, int | None] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    @property
    def ranks(self) -> range:
        return range(self.board.world_size)

    @property
    def lost(self) -> frozenset[int]:
        """The ranks that have ended early, and without which the run continues."""
        failed = {rank for rank, report in self.reports.items() if report.kind != "value"}
        return self.may_lose & (failed | (self.gone - self.reports.keys()))

    @property
    def missing(self) -> set[int]:
        """The ranks that have ended, and that the run cannot do without."""
        return self.gone - self.may_lose

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
        if code is None and (lost := self.agent.lost_with(rank)):
            return f"was lost {when}: {lost}"
        if code is None:
            why = self.agent.fault() or "its exit code has not arrived"
            return f"has ended {when}, and how it ended is not known: {why}"
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


def failure_error(evidence: Evidence) -> WorkerError:
    """The error for ranks that have raised or ended; it names the cause, not its consequences."""
    causes = [report for report in evidence.failures if report.kind != "peer_lost"]
    if causes:
        return _report_error(evidence, causes[0])
    if not evidence.missing:
        return _report_error(evidence, evidence.failures[0])
    order = list(evidence.exit_codes)
    # The first to end is the cause; sorted() keeps the rank order of those without an exit code.
    rank = min(
        sorted(evidence.missing), key=lambda r: order.index(r) if r in order else len(order)
    )
    if lost := evidence.agent.lost_with(rank):
        # Of the ranks of a lost host, one that others wait for says more.
        together = [r for r in sorted(evidence.missing) if evidence.agent.lost_with(r) == lost]
        rank = max(together, key=lambda r: len(evidence.who_waited_for(r)))
    how, waiting = evidence.how_it_left(rank), evidence.who_waited_for(rank)
    kind = DeadlockError if waiting and "exit code 0" in how else WorkerError
    told = f"rank {rank} {how}.{waiting} The other ranks were ended."
    return kind(evidence.agent.with_hosts(told), rank=rank)


def _report_error(evidence: Evidence, report: Report) -> WorkerError:
    where = readable(report.location)
    trace = readable(report.traceback, quote=False)
    if report.kind == "mismatch":
        told = evidence.agent.with_hosts(readable(report.summary))
        return DeadlockError(told, rank=report.rank, location=where)
    message, kind = f"rank {report.rank} {report.summary}", WorkerError
    if report.kind == "exited" and (waiting := evidence.who_waited_for(report.rank)):
        message, kind = f"{message}.{waiting}", DeadlockError
    if where:
        message += f"\n  at {where}"
    for rank in sorted(evidence.lost):
        message += f"\n  before that, rank {rank} {evidence.why_lost(rank)}"
    if report.kind == "raised":
        message += f"\n\nTraceback of rank {report.rank}:\n{trace.rstrip()}"
    told = evidence.agent.with_hosts(message)
    return kind(told, rank=report.rank, location=where, worker_traceback=trace)


def deadlock_error(evidence: Evidence, stuck: list[int]) -> DeadlockError:
    """The error for ranks that can never continue."""
    board = evidence.board.copy()
    where = readable(waits_in(board, stuck[0])[1])
    told = evidence.agent.with_hosts(readable(explain_deadlock(board, stuck)))
    return DeadlockError(told, rank=stuck[0], location=where)


def mismatch_error(evidence: Evidence, mismatch: str) -> DeadlockError:
    """The error for ranks of several hosts that do not fit, see ``find_mismatch``."""
    return DeadlockError(evidence.agent.with_hosts(readable(mismatch)))


def deadline_error(
    evidence: Evidence, timeout_s: float, stacks: Mapping[int, str], stopped: list[int]
) -> DeadlineError:
    """The error for a run that was still going at its deadline.

    Args:
        evidence: what is known about the ranks.
        timeout_s: the deadline, in seconds.
        stacks: {rank: stack dump} of the running ranks.
        stopped: the ranks that could not be asked, because a signal has suspended them.
    """
    board = evidence.board
    lines = [f"the run was still going at its deadline of {timeout_s:g} s (timeout_s)."]
    lines += [f"rank {rank} {_doing(board, rank, stacks[rank])}" for rank in sorted(stacks)]
    lines += map(readable, explain_queues(board))
    lines += [
        f"rank {rank} is stopped by a signal (SIGSTOP, or Ctrl-Z): kill -CONT "
        f"{evidence.pids[rank]} would have let it continue."
        for rank in stopped
    ]
    returned = [rank for rank in evidence.ranks if board.ranks[rank]["state"] == RETURNED]
    if returned:
        lines.append(f"ranks that had returned: {returned}.")
    lines += [f"rank {rank} {evidence.why_lost(rank)}." for rank in sorted(evidence.lost)]
    if fault := evidence.agent.fault():
        lines.append(f"{fault}.")
    elif not stopped:
        lines.append("Next step: look for an endless loop, or give the run a larger timeout_s.")
    return DeadlineError(evidence.agent.with_hosts("\n".join(lines)))


def _doing(board: Board, rank: int, stack: str) -> str:
    if not board.ranks[rank]["state"]:
        return "had not started yet."
    doing = f"was {explain_rank(board, rank)}"
    where = readable(learner_frames(stack))
    return f"{doing}:\n{where}" if where else f"{doing}; it did not report where."


def stopped_note(evidence: Evidence, stacks: Mapping[int, str]) -> str:
    """What each rank was doing when the caller stopped the run, in one line per rank.

    Args:
        evidence: what is known about the ranks.
        stacks: {rank: stack dump} of the ranks that were running.
    """
    lines = ["The run was stopped, and all its ranks were ended. What each was doing:"]
    states = {NOT_STARTED: "had not started yet", RETURNED: "had returned", LOST: "was lost"}
    for rank, slot in enumerate(evidence.board.ranks):
        doing = states.get(int(slot["state"])) or f"was {explain_rank(evidence.board, rank)}"
        _, where = waits_in(evidence.board, rank)
        if where := where or innermost_location(stacks.get(rank, "")):
            doing += f", at {readable(where)}"
        lines.append(f"  rank {rank} {doing}")
    return evidence.agent.with_hosts("\n".join(lines))
