"""The work queues of a process group, and the ``Comm`` below them.

One queue carries out the collectives, in the order of the calls. Sends and receives have one queue
per edge and direction, since they may wait for each other.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from labkit.comm.meeting import separate_comm
from labkit.comm.transport import Traffic
from labkit.comm.work import WorkQueue

# How long the end of the program waits for a thread that is inside a learner's function.
_LAST_PATIENCE_S = 2.0

# The counters of every group of this process; kept after a group is destroyed.
_traffic: list[Traffic] = []


def sent() -> tuple[int, int]:
    """Messages and bytes that this rank's "labkit" groups have sent so far, counted."""
    return sum(one.messages for one in _traffic), sum(one.num_bytes for one in _traffic)


class Queues:
    """The work queues of one rank of a process group; each starts with its first operation.

    One operation may take up to ``timeout``. ``ranks`` are the group's, as they are numbered in
    the run; None is all of them.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int] | None = None,
    ):
        # Messages of an edge are first in, first out, so each kind of traffic has its own Comm.
        self._comms = {
            part: separate_comm(part, store, rank, size, timeout, ranks)
            for part in ("collectives", "pairs")
        }
        _traffic.extend(comm.transport.sent for comm in self._comms.values())
        self._timeout_s = timeout.total_seconds()
        self._queues: dict[tuple[str, ...], WorkQueue] = {}
        self._starting = threading.Lock()
        _live.add(self)

    def collectives(self) -> WorkQueue:
        return self._queue("collectives")

    def edge(self, direction: str, peer: int) -> WorkQueue:
        """The queue of the messages ``"to"`` or ``"from"`` a peer."""
        return self._queue("pairs", direction, str(peer))

    def _queue(self, part: str, *way: str) -> WorkQueue:
        if not self._comms:
            raise ValueError("this process group was destroyed: make another with new_group")
        with self._starting:
            key = (part, *way)
            if key not in self._queues:
                name = "-".join(("labkit", *key))
                self._queues[key] = WorkQueue(name, self._comms[part], self._timeout_s)
            return self._queues[key]

    def set_timeout(self, timeout_s: float) -> None:
        """Set the longest wait from now on, also for operations under way."""
        self._timeout_s = timeout_s
        for queue in self._queues.values():
            queue.timeout_s = timeout_s
        for comm in self._comms.values():
            comm.transport.set_timeout(timeout_s)

    def end(self, patience_s: float | None = None) -> str:
        """End the threads after all queued operations; with ``patience_s``, after those under way.

        Returns which operation takes longer than the timeout and is left running; empty if none.
        """
        queues, self._queues = self._queues, {}
        comms, self._comms = self._comms, {}
        left_behind = ""
        # The queues that read end last: a receive from any source reads from all edges.
        for key in sorted(queues, key=lambda key: "from" in key):
            if "from" in key:
                comms["pairs"].transport.abandon()
            if not queues[key].end(patience_s):
                left_behind = left_behind or queues[key].why_late()
        for comm in comms.values():
            comm.session.leave()
        return left_behind

    def abandon(self) -> None:
        """End with the program: drop the queued operations, and wait for no other rank."""
        for comm in self._comms.values():
            comm.transport.abandon()
        self.end(_LAST_PATIENCE_S)


_live: weakref.WeakSet[Queues] = weakref.WeakSet()
# A forked child is not a rank: its exit must not end the queues of the rank.
os.register_at_fork(after_in_child=_live.clear)


@atexit.register
def abandon_all() -> None:
    """End the queues of all groups of this process, at its end."""
    # A thread that is inside PyTorch when the interpreter ends would abort the process.
    for queues in list(_live):
        queues.abandon()
