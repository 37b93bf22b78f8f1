"""Make one error, which names the cause, of reports, exit codes and the status board."""

import contextlib
import os
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from torch.utils._pytree import tree_leaves

from labkit import units
from labkit.engine.comm.board import NOT_STARTED, RETURNED, Board
from labkit.engine.comm.deadlock import (
    current_operation,
    explain_deadlock,
    explain_rank,
    takes_part,
)
from labkit.engine.comm.shared_memory import is_running
from labkit.engine.comm.source_lines import is_internal, is_ours, learner_frames, readable
from labkit.engine.comm.torch_transport import means_loss
from labkit.engine.errors import (
    DeadlineError,
    DeadlockError,
    MismatchError,
    PeerLostError,
    WorkerError,
)
from labkit.engine.runtime.messages import Report
from labkit.engine.started import GUARD, UNGUARDED

_SHM = Path("/dev/shm")
_END_PATIENCE_S = 0.5


def report_of_failure(rank: int, error: BaseException) -> Report:
    """Return, in the rank, the report of an exception for the launcher."""
    if isinstance(error, SystemExit):
        kind = "exited"
        summary = f"called sys.exit({error.code!r}) before its function had returned"
    elif isinstance(error, MismatchError):
        kind = "mismatch"
        summary = str(error)
    else:
        # Where PyTorch uses gloo or NCCL without labkit, a lost peer is a RuntimeError.
        is_lost_peer = isinstance(error, PeerLostError)
        is_lost_peer |= isinstance(error, RuntimeError) and means_loss(error)
        kind = "peer_lost" if is_lost_peer else "raised"
        summary = f"raised {type(error).__name__}: {_explained(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    location = ""
    for frame in frames:
        if not is_internal(frame.filename):
            location = f'"{frame.filename}", line {frame.lineno}'
    trace = traceback.TracebackException.from_exception(error)
    trace.stack[:] = [frame for frame in trace.stack if not is_ours(frame.filename)]
    text = "".join(trace.format()).removeprefix("Traceback (most recent call last):\n")
    return Report(rank, kind, summary=summary, location=location, traceback=text)


def _explained(error: BaseException) -> str:
    """The text of an error, and what it does not say if memory or /dev/shm is full."""
    try:
        # Without the stack in C++.
        text = str(error).partition("\nException raised from ")[0].strip()
    except Exception as fault:
        return f"its text cannot be shown, as __str__ raises {type(fault).__name__}"
    frames = traceback.extract_tb(error.__traceback__)
    # The semaphores of a queue are files in /dev/shm, and the error names none of them.
    ended_in = frames[-1].filename if frames else ""
    of_queue = isinstance(error, OSError) and "multiprocessing" in ended_in
    of_shm = isinstance(error, RuntimeError) and ("shared memory" in text or "</torch_" in text)
    if of_queue or of_shm:
        size = shutil.disk_usage(_SHM)
        free = f"{units.format_bytes(size.free)} of {units.format_bytes(size.total)}"
        return (
            f"{text}\n{_needed(error)}{_SHM} has {free} free. Next step: a DataLoader "
            "with num_workers=0 needs none of it, fewer workers or smaller batches need less; in "
            "a container it grows with docker run --shm-size=1g, elsewhere with (as root) mount "
            "-o remount,size=1g /dev/shm"
        )
    if isinstance(error, MemoryError) or "allocate memory" in text:
        held = units.format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return (
            f"{text or 'asked for more memory than there is'}; the rank held up to {held}. Next "
            "step: a smaller batch, model or result, or fewer ranks, since each needs as much"
        )
    limit = reached_limit(error)
    if limit and limit not in text:
        text += f". {limit}"
    return text


def reached_limit(error: BaseException) -> str:
    """The limit that an error means, with numbers and the next step; empty if it means none."""
    text = str(error)
    if "Too many open files" in text:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"This process may open {limit} files (ulimit -n); a run needs some 20 and 4 more per "
            "rank. Next step: ulimit -n 1024, or fewer ranks"
        )
    if "Resource temporarily unavailable" in text or "start new thread" in text:
        return f"The system says so when there may be no more threads: {process_limit()}"
    return ""


def process_limit() -> str:
    """The number of this user's processes and threads, their limit, and the next step."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    allowed = "any number" if limit == resource.RLIM_INFINITY else str(limit)
    count = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        if process.info["uids"] and process.info["uids"].real == os.getuid():
            count += process.info["num_threads"] or 0
    return (
        f"this user has {count} processes and threads, and may have {allowed} (ulimit -u; a "
        "container may have a limit of its own). Next step: fewer ranks, or a higher limit"
    )


def _needed(error: BaseException) -> str:
    """Describe what the DataLoader that failed keeps in shared memory; "" if it is not found."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        with contextlib.suppress(Exception):
            # A loader, or what iterates over it: there the same names begin with an underscore.
            attributes = vars(frame.f_locals["self"])
            loader = {name.lstrip("_"): value for name, value in attributes.items()}
            sampler = loader.get("batch_sampler") or loader["index_sampler"]
            num_workers = loader["num_workers"]
            num_batches = num_workers * (loader["prefetch_factor"] or 2)
            sample_bytes = 0
            for leaf in tree_leaves(loader["dataset"][0]):
                sample_bytes += getattr(leaf, "nbytes", 8)
            held_bytes = num_batches * sampler.batch_size * sample_bytes
            return (
                f"The DataLoader's {num_workers} workers keep up to {num_batches} batches of "
                f"{sampler.batch_size} in shared memory, {units.format_bytes(held_bytes)} on each "
                "rank; "
            )
    return ""


def remove_empty_segments() -> None:
    """Remove the empty files that PyTorch leaves in /dev/shm where it could not allocate there."""
    until_s = time.monotonic() + _END_PATIENCE_S
    for path in _SHM.glob("torch_*_*_*"):
        with contextlib.suppress(OSError, ValueError):
            maker = int(path.name.split("_")[1])
            # A worker that was killed may take a moment to end.
            while not path.stat().st_blocks and is_running(maker) and time.monotonic() < until_s:
                time.sleep(0.01)
            if not path.stat().st_blocks and not is_running(maker):
                path.unlink()


@dataclass
class Evidence:
    """The known facts about the ranks of a run; exit codes in the order in which ranks ended."""

    board: Board
    may_lose: frozenset[int] = frozenset()
    reports: dict[int, Report] = field(default_factory=dict)
    exit_codes: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def lost(self) -> frozenset[int]:
        """The ranks that have ended early, and without which the run continues."""
        failed = {rank for rank, report in self.reports.items() if report.kind != "value"}
        return self.may_lose & (failed | (self.exit_codes.keys() - self.reports.keys()))

    @property
    def missing(self) -> list[int]:
        """The ranks that have ended, and are needed, but for their report of a failure."""
        explained = self.may_lose | {report.rank for report in self.failures}
        return [rank for rank in self.exit_codes if rank not in explained]

    @property
    def failures(self) -> list[Report]:
        """The reports of ranks that have failed, and that the run cannot do without."""
        reports = self.reports.values()
        return [r for r in reports if r.kind != "value" and r.rank not in self.may_lose]

    def explain_loss(self, rank: int) -> str:
        """``raised ValueError: ... at Cell In[3], line 4``, for example."""
        if rank not in self.reports:
            return self.explain_exit(rank)
        report = self.reports[rank]
        text = report.summary
        if report.location:
            text += f" at {report.location}"
        return readable(text)

    def explain_exit(self, rank: int) -> str:
        """The end of a rank without a report, as ``was killed by SIGKILL in mid-run``."""
        code = self.exit_codes.get(rank)
        state = int(self.board.ranks[rank]["state"])
        known = {NOT_STARTED: "before it had started", RETURNED: "after its function had returned"}
        when = known.get(state, "in mid-run")
        if code is None:
            return f"has ended {when}"
        if code == UNGUARDED and state == NOT_STARTED:
            return (
                "ended before it had started: each rank imports the script, which then calls "
                f"labkit.run again; there it has to be called {GUARD}"
            )
        if code == 1 and state == NOT_STARTED:
            return (
                "ended before it had started, with exit code 1: stderr says more. (It imports the "
                f"script that starts it, which needs what is to run once {GUARD})"
            )
        if code >= 0:
            return f"left early with exit code {code}, {when}"
        name = f"signal {-code}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
        text = f"was killed by {name} {when}"
        if code == -signal.SIGKILL:
            text += " (the system does that when memory runs out)"
        return text

    def explain_waiting_for(self, rank: int) -> str:
        """A sentence for each other rank that was in an operation with ``rank``."""
        board = self.board.copy()
        sentences = []
        for other in range(board.world_size):
            if other != rank and takes_part(board, other, rank):
                op, location = current_operation(board, other)
                line = readable(location)
                sentences.append(f" Rank {other} was waiting for it in {op} at {line}.")
        return "".join(sentences)


def failure_error(evidence: Evidence) -> WorkerError:
    """The error for ranks that have raised or ended; it names the cause, not its consequences."""
    failures = evidence.failures
    causes = [report for report in failures if report.kind != "peer_lost"]
    missing = evidence.missing
    if missing and not causes:
        rank = missing[0]
        text = f"rank {rank} {evidence.explain_exit(rank)}.{evidence.explain_waiting_for(rank)}"
        return WorkerError(f"{text} The other ranks were ended.", rank=rank)
    report = causes[0] if causes else failures[0]
    location = readable(report.location)
    if report.kind == "mismatch":
        return DeadlockError(readable(report.summary), rank=report.rank, location=location)
    message = f"rank {report.rank} {report.summary}"
    if report.kind == "exited":
        message += f".{evidence.explain_waiting_for(report.rank)}"
    if location:
        message += f"\n  at {location}"
    for rank in sorted(evidence.lost):
        message += f"\n  before that, rank {rank} {evidence.explain_loss(rank)}"
    trace = readable(report.traceback, quote=False)
    if report.kind == "raised":
        message += f"\n\nTraceback of rank {report.rank}:\n{trace.rstrip()}"
    return WorkerError(message, rank=report.rank, location=location, worker_traceback=trace)


def deadlock_error(board: Board, stuck: list[int]) -> DeadlockError:
    """The error for ranks that can never continue."""
    board = board.copy()
    _, location = current_operation(board, stuck[0])
    text = readable(explain_deadlock(board, stuck))
    return DeadlockError(text, rank=stuck[0], location=readable(location))


def deadline_error(
    evidence: Evidence, timeout_s: float, stacks: Mapping[int, str]
) -> DeadlineError:
    """The error for a run that was still going at its deadline; ``stacks`` are dumps by rank."""
    lines = [f"the run was still going at its deadline of {timeout_s:g} s (timeout_s)."]
    for rank, slot in enumerate(evidence.board.ranks):
        state = int(slot["state"])
        if rank in evidence.lost:
            line = f"{evidence.explain_loss(rank)}."
        elif state == NOT_STARTED:
            line = "had not started yet."
        elif state == RETURNED:
            line = "had returned."
        else:
            line = f"was {explain_rank(evidence.board, rank)}"
            stack = readable(learner_frames(stacks.get(rank, "")))
            line += f":\n{stack}" if stack else "; it did not report where."
        lines.append(f"rank {rank} {line}")
    lines.append("Next step: look for an endless loop, or give the run a larger timeout_s.")
    return DeadlineError("\n".join(lines))
