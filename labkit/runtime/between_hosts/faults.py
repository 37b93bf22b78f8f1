"""Finding, on a board with the rows of all hosts, why a run cannot go on.

The explanations are those of ``labkit.run``, with the hosts of the ranks.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from labkit.comm.board import RUNNING, Board
from labkit.comm.deadlock import explain_rank, find_mismatch, stuck_ranks, takes_part, waits_in
from labkit.comm.processes import is_debugged, is_stopped
from labkit.comm.source_lines import readable
from labkit.errors import DeadlockError, WorkerError
from labkit.runtime.between_hosts.rows import Beat
from labkit.runtime.between_hosts.verdict import Verdict, ranks_of, with_hosts
from labkit.runtime.failures import Evidence, deadlock_error, failure_error
from labkit.runtime.messages import Report

# While others wait: how long a rank may be stopped, and a host with broken connections silent.
STOPPED_S = 3.0
SILENT_S = 2.0
# If the host's own system still answers, its ranks may only be busy.
BUSY_S = 30.0
# How many beats of every other host must pass without any rank moving: the look that led to the
# last of them began after this host had seen that nobody moves.
_STILL_BEATS = 3
_GONE = "its processes or the machine have ended, or its network is cut"
_BUSY = "its machine answers, but its processes are stopped, or in a call that lets no thread run"


class Faults:
    """What one rank of a host finds, while it watches for its host.

    Args:
        board: of this host, with mirrored rows of the others.
        hosts: the ranks of each host.
        near: the ranks whose processes this rank can see.
        names: of the hosts.
    """

    def __init__(
        self,
        board: Board,
        hosts: Sequence[Sequence[int]],
        near: Sequence[int],
        names: Sequence[str],
    ):
        self.board, self.hosts, self.near = board, hosts, near
        self.names = dict(enumerate(names))
        self._candidate: tuple[object, ...] | None = None
        self._seen: dict[int, int] = {}
        self._looks = 0
        self._stopped_s: dict[int, float] = {}

    def explained(self, error: WorkerError, is_raised: bool = False) -> Verdict:
        verdict = Verdict.of(error, is_raised)
        return replace(verdict, text=with_hosts(verdict.text, self.hosts, self.names))

    def of_reports(self, *reports: Report) -> Verdict:
        """What ranks have reported of themselves."""
        found = {report.rank: report for report in reports}
        error = failure_error(self._evidence(reports=found))
        if lines := readable(self._lines(str(error))):
            error = type(error)(f"{error}{lines}", rank=error.rank, location=error.location)
        return self.explained(error, is_raised=True)

    def of_ends(self, codes: Mapping[int, int | None]) -> Verdict:
        """Of ranks whose processes have ended, by exit code; the first of them is the cause."""
        return self.explained(failure_error(self._evidence(exit_codes=codes)))

    def _evidence(self, **known: Any) -> Evidence:
        return Evidence(self.board.copy(), **known)

    def standing_still(self, beats: Mapping[int, Beat]) -> Verdict | None:
        """A mismatch or a deadlock, if nobody has moved since it was first seen."""
        self._looks += 1
        board = self.board.copy()
        mismatch = find_mismatch(board)
        stuck = [] if mismatch else stuck_ranks(board)
        if not mismatch and not stuck:
            self._candidate = None
            return None
        candidate = mismatch, tuple(stuck), board.ticks()
        counts = {host: beat.count for host, beat in beats.items()}
        if candidate != self._candidate:
            self._candidate, self._seen, self._looks = candidate, counts, 0
            return None
        if self._looks < 1 or any(counts[h] < self._seen[h] + _STILL_BEATS for h in counts):
            return None
        if mismatch:
            return self.explained(DeadlockError(readable(mismatch + self._lines(mismatch))))
        return self.explained(deadlock_error(self.board, stuck))

    def _lines(self, mismatch: str) -> str:
        """The lines of two ranks that call different collectives; empty for other texts."""
        named = re.match(r"rank (\d+) and rank (\d+) call different collectives", mismatch)
        ranks = map(int, named.groups()) if named else ()
        slots = self.board.ranks
        return "".join(
            f"\n  rank {rank} is at {slots[rank]['location'].decode(errors='replace')}"
            for rank in ranks
        )

    def stopped(self) -> Verdict | None:
        """A rank of this host that a signal has stopped, and that another rank waits for."""
        now_s, pids = time.monotonic(), self.board.ranks["pid"]
        for rank in self.near:
            pid = int(pids[rank])
            if pid == os.getpid() or not is_stopped(pid) or is_debugged(pid):
                self._stopped_s.pop(rank, None)
                continue
            since_s = self._stopped_s.setdefault(rank, now_s)
            waiting = self._evidence().who_waited_for(rank)
            if waiting and now_s - since_s > STOPPED_S:
                text = (
                    f"rank {rank} is stopped by a signal (SIGSTOP, or Ctrl-Z): kill -CONT {pid} "
                    f"would have let it continue.{waiting}"
                )
                return self.explained(WorkerError(text, rank=rank))
        return None

    def silent(self, beats: Mapping[int, Beat], connected: bool) -> Verdict | None:
        """A host of which nothing is heard any more, though ranks wait for it.

        Args:
            connected: whether all connections to other hosts still stand.
        """
        for host, beat in beats.items():
            silent_s, theirs = time.monotonic() - beat.heard_s, self.hosts[host]
            others = (r for r in range(self.board.world_size) if r not in theirs)
            is_needed = any(takes_part(self.board, r, peer) for r in others for peer in theirs)
            if silent_s > (BUSY_S if connected else SILENT_S) and is_needed:
                why = _BUSY if connected else _GONE
                heard = f"nothing was heard of it for {silent_s:.0f} s"
                return self._lost_host(host, f"{heard}: {why}")
        return None

    def store_is_gone(self, address: str, why: str) -> Verdict:
        """The store of the run does not answer: it is on the host of rank 0."""
        host = next(host for host, ranks in enumerate(self.hosts) if 0 in ranks)
        held = f"the store at {address}, which its torchrun holds"
        return self._lost_host(host, f"{held}, does not answer ({why})")

    def _lost_host(self, host: int, why: str) -> Verdict:
        ranks = self.hosts[host]
        lines = [f"host {host} ({ranks_of(ranks)}) is lost: {why}."]
        for rank in ranks:
            known = "had not started, or had returned"
            if self.board.ranks[rank]["state"] == RUNNING:
                _, where = waits_in(self.board, rank)
                where = f", at {readable(where)}" if where else ""
                known = f"was {explain_rank(self.board, rank)}{where}"
            waiting = self._evidence().who_waited_for(rank)
            lines.append(f"  rank {rank}, when last heard of, {known}.{waiting}")
        return self.explained(WorkerError("\n".join(lines), rank=ranks[0]))
