"""Operations that are only queued: what a rank has queued, what has ended, and who is waited for.

On NCCL send, recv and exchange return at once, and are carried out in one order, first in first
out. So a rank that waits for a peer is not seen in the operation, but wherever it waits for all
that it has queued: at the end of its function, at a barrier, when it reads a value. There it posts
the first operation that has not ended, and nothing behind that one can overtake it.
"""

import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from labkit.comm.board import QUEUED, RECV, RECV_ANY, SEND, Board
from labkit.comm.torch_transport import first_line, means_loss
from labkit.comm.transport import Transport
from labkit.comm.waiting import LOOK_S, why_gone
from labkit.errors import PeerLostError

_SPIN_S = 200e-6
_LONGEST_PAUSE_S = 5e-3


@dataclass
class Operation:
    """One queued operation.

    Attributes:
        op: its name.
        sent, expected: (peer, description of the tensor) of its two ends, as far as it has them.
        location: the caller's line.
        works: what PyTorch has returned for it.
        ends: by (side, source, destination), its number on that end of the edge.
        stream: the stream that waits for it, see ``Transport.stream``.
    """

    op: str
    sent: tuple[int, str] | None
    expected: tuple[int, str] | None
    location: str
    works: list[Any] = field(default_factory=list)
    ends: dict[tuple[int, int, int], int] = field(default_factory=dict)
    stream: int = 0

    @property
    def peers(self) -> set[int]:
        return {end[0] for end in (self.sent, self.expected) if end is not None}


class Queue:
    """The operations that one rank has queued; posts how far they are on the board.

    A thread looks after them: while the rank computes or waits inside CUDA, it keeps the board up
    to date, and if the process of an awaited peer has ended it aborts what is queued.
    """

    def __init__(self, rank: int, board: Board, transport: Transport):
        self._rank, self._board, self._transport = rank, board, transport
        self._operations: deque[Operation] = deque()
        self._lock = threading.Lock()
        self._queued = self._ended = 0
        self._error: Exception | None = None
        self._is_told = False
        self._watch: threading.Thread | None = None
        self._closed = threading.Event()

    def begin(self, op: str, sent: Any, expected: Any, location: str) -> Operation:
        """An operation that has been posted, and is about to be queued."""
        stream = self._transport.stream()
        operation = Operation(op, sent, expected, location, stream=stream)
        for side, peer in ((SEND, sent), (RECV, expected)):
            if peer is not None:
                end = self._end(side, peer[0])
                operation.ends[end] = int(self._board.counts[end])
        return operation

    def add(self, operation: Operation) -> None:
        """Look after an operation from now on, until it has ended."""
        operation.works = self._transport.take_queued()
        with self._lock:
            self._operations.append(operation)
            self._queued += 1
            self._board.ranks[self._rank]["queued"] = self._queued
        if self._watch is None:
            self._watch = threading.Thread(target=self._look, name="labkit-queue", daemon=True)
            self._watch.start()
        self.settle()

    def make_room(self, sent: Any, expected: Any) -> None:
        """Wait while this rank is so far ahead of a peer that descriptions would be overwritten.

        Raises PeerLostError if the queue was aborted.
        """
        self._raise_error()
        for side, peer in ((SEND, sent), (RECV, expected)):
            # Between machines nobody sees what a peer has posted.
            if peer is None or not self._board.ranks[peer[0]]["pid"]:
                continue
            _, source, destination = end = self._end(side, peer[0])
            ahead = self._board.counts[end] - self._board.counts[1 - side, source, destination]
            if ahead >= QUEUED:
                self.flush(f"its operation {QUEUED} ahead of rank {peer[0]}")

    def _end(self, side: int, peer: int) -> tuple[int, int, int]:
        return (side, self._rank, peer) if side == SEND else (side, peer, self._rank)

    def settle(self) -> bool:
        """Take note of what has ended; returns whether that is everything, or one has failed."""
        with self._lock:
            while not self._error and self._operations and _has_ended(self._operations[0].works):
                ended = self._operations.popleft()
                self._ended += 1
                if error := next(filter(None, map(_error_of, ended.works)), None):
                    self._error = _of_operation(ended, error)
                    # A group that has failed cannot be used again: nobody may wait for this rank.
                    self._board.give_up(self._rank, first_line(error))
                    break
                for end, number in ended.ends.items():
                    self._board.begun[end] = number
            self._post_head()
            return self._error is not None or not self._operations

    def _raise_error(self) -> None:
        if self._error is not None:
            self._is_told = True
            raise self._error

    def finish(self, where: str) -> None:
        """``flush`` at the end, unless the program has been told that its queue was aborted."""
        if not self._is_told:
            self.flush(where)

    def _post_head(self) -> None:
        """Post the first operation that has not ended, so that others see who is waited for."""
        slot = self._board.ranks[self._rank]
        head = self._operations[0] if self._operations else Operation("", None, None, "")
        if slot["ended"] == self._ended and slot["head_op"].decode() == head.op:
            return
        slot["head_location"] = head.location.encode()
        slot["head_dst"], sent = head.sent or (-1, "")
        slot["head_src"], expected = head.expected or (-1, "")
        slot["head_sent"], slot["head_expected"] = sent.encode(), expected.encode()
        slot["head_op"] = head.op.encode()
        for end, number in head.ends.items():
            self._board.begun[end] = number
        slot["ended"] = self._ended
        slot["ticks"] += 1

    def flush(self, where: str, *, mine: bool = False) -> None:
        """Wait until all that is queued has ended; the board says so meanwhile.

        Args:
            where: at which point of its program the rank waits.
            mine: wait only for what the current stream waits for.

        Raises:
            PeerLostError: a peer that it waits for is lost.
        """
        self._raise_error()
        upto = self._upto(self._transport.stream() if mine else None)
        if self.settle() or self._ended >= upto:
            self._raise_error()
            return
        slot = self._board.ranks[self._rank]
        slot["resting"] = where.encode()
        slot["ticks"] += 1
        started_s = time.monotonic()
        # After an error it stays posted, as an operation does, for the launcher's explanation.
        while not self.settle() and self._ended < upto:
            waited_s = time.monotonic() - started_s
            if waited_s < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(min(waited_s / 10, _LONGEST_PAUSE_S))
        self._raise_error()
        slot["resting"] = b""
        slot["ticks"] += 1

    def _upto(self, stream: int | None) -> int:
        """How many operations will have ended with the last one that a stream waits for."""
        with self._lock:
            queued = list(enumerate(self._operations, self._ended + 1))
        of_it = [number for number, one in queued if stream in (None, one.stream)]
        return max(of_it, default=0)

    def _look(self) -> None:
        suspects: set[int] = set()
        while not self._closed.wait(LOOK_S):
            self.settle()
            if self._error is not None:
                # Whoever uses the queue next gets it.
                return
            gone = {peer for peer in self._awaited() if why_gone(self._board, peer)}
            # What a peer has sent before its end may still arrive: so a peer is looked at twice.
            if lost := gone & suspects:
                self._give_up(min(lost))
                return
            suspects = gone

    def _awaited(self) -> set[int]:
        """The peers without which the first operation, or the barrier it is in, cannot end."""
        with self._lock:
            if self._operations:
                return self._operations[0].peers
        slot, everyone = self._board.ranks[self._rank], range(self._board.world_size)
        is_alone = not slot["op"] or slot["op"].decode() == RECV_ANY
        if not is_alone and slot["dst"] < 0 and slot["src"] < 0:
            came = self._board.ranks["meetings"]
            return {peer for peer in everyone if came[peer] < slot["meetings"]}
        return set()

    def _give_up(self, lost: int) -> None:
        why = why_gone(self._board, lost)
        with self._lock:
            head = self._operations[0] if self._operations else None
            self._error = _of_operation(head, PeerLostError(why, lost), lost)
        self._board.give_up(self._rank, why)
        self._transport.abort()

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way and nothing has failed, so that the group may be left."""
        return self._error is None and not self._operations

    def close(self) -> None:
        """Stop looking after what is queued."""
        self._closed.set()


def _has_ended(works: list[Any]) -> bool:
    return all(work.is_completed() for work in works)


def _error_of(work: Any) -> Exception | None:
    """What a completed operation has ended with; None if it went well."""
    # Work.exception() is deprecated, and each rank would print a warning.
    try:
        work.wait()
    except Exception as error:
        return error
    return None


def _of_operation(
    operation: Operation | None, error: Exception, lost: int | None = None
) -> Exception:
    """The error of a queued operation: names the operation, and the line that has queued it."""
    if operation is None or not (isinstance(error, PeerLostError) or means_loss(error)):
        return error
    names = " and ".join(f"rank {peer}" for peer in sorted(operation.peers))
    peer = min(operation.peers) if len(operation.peers) == 1 else lost
    why = first_line(error)
    return PeerLostError(
        f"{operation.op} with {names}, queued at {operation.location}, broke off: {why}", peer
    )
