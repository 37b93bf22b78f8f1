"""The session behind a ``Comm``: its place in the run, on the status board and in the trace.

``Comm`` moves tensors. Around each operation its session posts it on the board, so that a run that
stands still can be explained, and records its span. The runtime, the backend and work queues
manage a comm through its session; strategies and learners never need it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from labkit.comm.board import LEFT, RECV, SEND, Board
from labkit.comm.mismatch import check_collective, check_message
from labkit.comm.source_lines import caller_location
from labkit.comm.transport import Transport
from labkit.comm.waiting import Doorbells
from labkit.errors import PeerLostError
from labkit.trace import ClockTimer, CudaTimer, Recorder

# One end of a message: the peer, and what is sent to it or expected from it.
End = tuple[int, str]


class Session:
    """One rank's place in a run.

    Args:
        device: where the rank's tensors live, and whose time the trace takes.
        doorbells: wake up a rank in recv_any; None where ranks have none.
        keep_spans: how many spans to keep, the latest; None keeps all.

    Attributes:
        operations: calls of send, recv, recv_any and exchange so far, and messages of a stream.
        recorder: collects this rank's spans.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        transport: Transport,
        board: Board,
        doorbells: Doorbells | None = None,
        keep_spans: int | None = None,
    ):
        self.rank = rank
        self.transport = transport
        self.board = board
        self.doorbells = doorbells
        self.operations = 0
        self._on_gpu = device.type == "cuda"
        timer = CudaTimer(device) if self._on_gpu else ClockTimer()
        self.recorder = Recorder(rank, timer, keep=keep_spans)
        self._host = ClockTimer()
        self._closed = False

    # Around the operations of ``Comm``

    def check_open(self) -> None:
        if self._closed:
            raise ValueError(
                "this comm is used after the end of its run: start another with labkit.run"
            )

    def announce(self, what: str) -> None:
        """Post the next collective; MismatchError if another rank has called something else."""
        self.board.announce(self.rank, what, caller_location())
        check_collective(self.board, self.rank)

    @contextmanager
    def operation(
        self, op: str, sent: End | None = None, expected: End | None = None, start: Any = None
    ) -> Iterator[None]:
        """Inside a transfer: post it, time it, and name the peer if that is lost.

        Args:
            op: its name.
            sent, expected: (peer, description) of what leaves and of what comes.
            start: the mark at which it began; None is now.
        """
        self.check_open()
        dst, src = sent and sent[0], expected and expected[0]
        leaving = None if dst is None else self.transport.sent.to[dst]
        bytes_before = leaving.num_bytes if leaving else 0
        start = self.recorder.timer.mark() if start is None else start
        self._post(op, sent, expected)
        try:
            yield
        except PeerLostError as error:
            peers = [peer for peer in dict.fromkeys((dst, src)) if peer is not None]
            names = " and ".join(f"rank {peer}" for peer in peers)
            lost = peers[0] if len(peers) == 1 else error.rank
            raise PeerLostError(f"{op} with {names} broke off: {error}", lost) from error
        self.board.leave(self.rank)
        self.operations += 1
        num_bytes = leaving.num_bytes - bytes_before if leaving else 0
        arrived = None if self._on_gpu else self.board.arrived_s(self.rank, dst, src)
        self.record(start, num_bytes, src if dst is None else dst, arrived)

    def _post(self, op: str, sent: End | None, expected: End | None) -> None:
        self.board.enter(self.rank, op, self._host.mark(), caller_location(), sent, expected)
        if sent:
            check_message(self.board, SEND, self.rank, sent[0])
        if expected:
            check_message(self.board, RECV, expected[0], self.rank)
        if sent and self.doorbells is not None:
            self.doorbells.ring(sent[0])

    def record(self, start: Any, num_bytes: int, peer: int | None, arrived: Any = None) -> None:
        """Record a transfer that ends now, of which the time until ``arrived`` was waiting."""
        self.recorder.transfer(start, self.recorder.timer.mark(), num_bytes, peer, arrived)

    @contextmanager
    def meeting(self, op: str) -> Iterator[None]:
        """Inside an operation that needs every rank to come to it."""
        self.board.enter_meeting(self.rank, op, self._host.mark())
        try:
            yield
        except PeerLostError as error:
            raise PeerLostError(f"a rank left before {op}: {error}") from error
        self.board.leave(self.rank)

    def barrier(self) -> None:
        timer = self.recorder.timer
        start = timer.mark()
        with self.meeting("barrier"):
            self.transport.barrier()
        # A barrier has no payload, so all of it is waiting.
        end = timer.mark()
        self.recorder.transfer(start, end, 0, None, arrived=None if self._on_gpu else end)

    @contextmanager
    def streaming(self, name: str, dst: int) -> Iterator[None]:
        """Inside a collective that moves its segments to ``dst`` through a channel by itself.

        It is one span, to which every rank has to come; each message that the channel counts is
        an operation.
        """
        sent = self.transport.sent.to[dst]
        messages, num_bytes = sent.messages, sent.num_bytes
        start = self.recorder.timer.mark()
        with self.meeting(name):
            yield
        self.operations += sent.messages - messages
        arrived = None if self._on_gpu else self.board.meeting_arrived_s(self.rank)
        self.record(start, sent.num_bytes - num_bytes, dst, arrived)

    # For who manages the run

    def start_together(self) -> None:
        """Meet the other ranks, then make this moment second 0 of the trace on all of them."""
        self.board.ranks[self.rank]["origin_s"] = self._host.mark()
        self.transport.barrier()
        # One clock serves all ranks of a machine: the last arrival is the same number for all.
        origin = None if self._on_gpu else float(self.board.ranks["origin_s"].max())
        self.recorder = Recorder(self.rank, self.recorder.timer, origin)

    def leave(self) -> None:
        """Close, and tell ranks that wait for this one that it has left for good."""
        self.close()
        self.board.ranks[self.rank]["state"] = LEFT

    def close(self) -> None:
        """End of the run: every later use of the comm is refused."""
        if self.transport.ends_together:
            with self.meeting("the end of the run"):
                self.transport.barrier()
        self.transport.close()
        self._closed = True
