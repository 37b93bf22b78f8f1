"""The session of a ``Comm``: it posts operations on the status board and records their spans.

``Comm`` moves tensors. For each operation its session makes an entry on the board, from which a
deadlock can be explained, and a span in the trace. The runtime, the backend and the work queues
manage a comm through its session; strategies and learners never need it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from labkit import gpus
from labkit.comm.board import LEFT, RECV, SEND, Board
from labkit.comm.device_timers import DeviceTimers, without_drift
from labkit.comm.mismatch import check_collective, check_message
from labkit.comm.peak_memory import MemoryMeter, Part
from labkit.comm.queued import Operation, Queue
from labkit.comm.reported_loss import ReportedLoss
from labkit.comm.source_lines import caller_location
from labkit.comm.span_sums import SpanSums
from labkit.comm.transport import Transport
from labkit.comm.waiting import Bell, Doorbells
from labkit.errors import PeerLostError
from labkit.tracing import ClockTimer, CudaTimer, Meeting, Recorder, Span

# One end of a message: the peer, and the description of the tensor that is sent or expected.
End = tuple[int, str]


class Session:
    """One rank's entries on the status board and in the trace.

    Args:
        device: where the rank's tensors live; on a GPU, spans are timed with CUDA events.
        doorbells: wake up a rank in recv_any; None where ranks share no semaphores.
        hosts: the ranks of each host; None for one host with all of them.
        keep_spans: keep only this many spans, the latest; None keeps all.

    Attributes:
        hosts: the ranks of each host; an emulated link may show others (``Comm.hosts``).
        operations: calls of send, recv, recv_any and exchange so far, and the messages inside
            ``streaming``.
        barriers: calls of barrier so far.
        recorder: collects this rank's spans.
        timers: the clocks of the devices that this rank uses.
        loss: takes the losses that this rank reports.
        queue: what was queued and has not ended; None if operations end before they return.
        sums: this rank's seconds by kind of span; None before ``start_together``.
        memory: measures this rank's peak memory; None before ``start_together``.
        at_close: called first when the session is closed.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        transport: Transport,
        board: Board,
        doorbells: Doorbells | None = None,
        keep_spans: int | None = None,
        hosts: tuple[tuple[int, ...], ...] | None = None,
    ):
        self.rank = rank
        self.transport = transport
        self.board = board
        self.doorbells = doorbells or Doorbells(board, rank, math.inf, {rank: Bell()})
        self.hosts = hosts or (tuple(range(board.world_size)),)
        self.operations = self.barriers = 0
        self.device = device
        self.queue = Queue(rank, board, transport) if transport.queues else None
        self._on_gpu = device.type == "cuda"
        self.memory: MemoryMeter | None = None
        self.at_close: list[Callable[[], None]] = []
        self._host = ClockTimer()
        self.timers, self.loss = DeviceTimers(), ReportedLoss(board.ranks[rank])
        self.recorder = Recorder(rank, self.timers.of(device), keep=keep_spans)
        self.sums: SpanSums | None = None
        # Whether the starts of operations can be compared with those of other ranks after the run.
        self._compares = False
        self._closed = False

    # For the operations of ``Comm``

    def check_open(self) -> None:
        if self._closed:
            raise ValueError(
                "this comm is used after the end of its run: start another with labkit.run"
            )

    def announce(self, what: str) -> None:
        """Post the next collective; MismatchError if another rank has called another one."""
        self.board.announce(self.rank, what, caller_location())
        check_collective(self.board, self.rank)

    @contextmanager
    def operation(
        self, op: str, sent: End | None = None, expected: End | None = None, start: Any = None
    ) -> Iterator[Callable[[], None]]:
        """Wrap a transfer: post it, time it, and name the peer in the error if the peer is lost.

        Args:
            op: the name of the transfer.
            sent, expected: (peer, description) of the outgoing and of the incoming tensor.
            start: the timer's mark at the beginning; None means now.

        Yields:
            A function, to be called after other operations inside the block: from then on the rank
            is in this one again, and its span begins there.
        """
        self.check_open()
        dst, src = sent and sent[0], expected and expected[0]
        leaving = None if dst is None else self.transport.sent.to[dst]
        bytes_before = leaving.num_bytes if leaving else 0
        start = self.recorder.timer.mark() if start is None else start
        if self.queue is not None:
            self.queue.make_room(sent, expected)
        queued = self._post(op, sent, expected)

        def again() -> None:
            nonlocal start
            self.board.again(self.rank, op, dst, src)
            start = self.recorder.timer.mark()

        try:
            yield again
        except PeerLostError as error:
            peers = [peer for peer in dict.fromkeys((dst, src)) if peer is not None]
            names = " and ".join(f"rank {peer}" for peer in peers)
            lost = peers[0] if len(peers) == 1 else error.rank
            raise PeerLostError(f"{op} with {names} broke off: {error}", lost) from error
        if self.queue is not None and queued is not None:
            self.queue.add(queued)
        self.board.leave(self.rank)
        self.operations += 1
        num_bytes = leaving.num_bytes - bytes_before if leaving else 0
        unknown = self._on_gpu or self.queue is not None
        arrived = None if unknown else self.board.arrived_s(self.rank, dst, src)
        peer = src if dst is None else dst
        self.record(start, num_bytes, peer, arrived, self._messages(dst, src))

    def _post(self, op: str, sent: End | None, expected: End | None) -> Operation | None:
        """Post a transfer and check that its ends fit; returns it if it will only be queued."""
        where, queues = caller_location(), self.queue is not None
        self.board.enter(self.rank, op, self._host.mark(), where, sent, expected, queues)
        queued = None
        if self.queue is not None:
            queued = self.queue.begin(op, sent, expected, where)
        if sent:
            check_message(self.board, SEND, self.rank, sent[0], queues)
        if expected:
            check_message(self.board, RECV, expected[0], self.rank, queues)
        if sent:
            self.doorbells.ring(sent[0])
        return queued

    def _messages(self, dst: int | None, src: int | None) -> tuple[Meeting, ...]:
        """The messages of this rank's latest operation, if their two ends are to be compared."""
        if not self._compares:
            return ()
        edges = [] if dst is None else [(SEND, self.rank, dst)]
        edges += [] if src is None else [(RECV, src, self.rank)]
        return tuple((*edge[1:], int(self.board.counts[edge])) for edge in edges)

    def record(
        self,
        start: Any,
        num_bytes: int,
        peer: int | None,
        arrived: Any = None,
        meets: tuple[Meeting, ...] = (),
    ) -> None:
        """Record a transfer that ends now; the time until ``arrived`` counts as waiting."""
        self.recorder.transfer(start, self.recorder.timer.mark(), num_bytes, peer, arrived, meets)

    @contextmanager
    def meeting(self, op: str) -> Iterator[None]:
        """Wrap an operation that every rank has to take part in."""
        self.board.enter_meeting(self.rank, op, self._host.mark())
        try:
            yield
        except PeerLostError as error:
            raise PeerLostError(f"a rank left before {op}: {error}") from error
        self.board.leave(self.rank)

    def barrier(self) -> None:
        timer = self.recorder.timer
        start = timer.mark()
        self.flush("barrier")
        # A rank has come once its queued work has ended, so a clock read after a barrier is right.
        gpus.synchronize(self.device)
        with self.meeting("barrier"):
            self.transport.barrier()
            # A barrier that was aborted may return.
            self.flush("barrier")
        # A barrier has no payload, so all its time is waiting.
        self.recorder.wait(start, timer.mark())
        self.barriers += 1

    def flush(self, where: str, *, mine: bool = False) -> None:
        """Wait until what this rank has queued has ended; ``where`` tells it on the board.

        With ``mine``, only what the current stream waits for. Nothing is queued except on NCCL.

        Raises:
            PeerLostError: a peer that it waits for is lost.
        """
        if self.queue is not None:
            self.queue.flush(where, mine=mine)

    def finish(self, where: str) -> None:
        """``flush`` at the end, unless the program knows already that a peer is lost.

        Without the peers that a run may lose, a program may go on and return.
        """
        if self.queue is not None:
            self.queue.finish(where)

    @contextmanager
    def streaming(self, name: str, dst: int, ranks: Sequence[int] | None = None) -> Iterator[None]:
        """Wrap a collective that writes its segments for ``dst`` directly into a channel.

        Every rank has to take part. The collective is one span; each message that the channel
        counts is one operation. ``ranks``: those whose messages it waits for; by default all.
        """
        sent = self.transport.sent.to[dst]
        messages, num_bytes = sent.messages, sent.num_bytes
        start = self.recorder.timer.mark()
        with self.meeting(name):
            yield
        self.operations += sent.messages - messages
        arrived = None if self._on_gpu else self.board.meeting_arrived_s(self.rank, ranks)
        number = int(self.board.ranks[self.rank]["meetings"])
        meets = ((-1, -1, number),) if self._compares else ()
        self.record(start, sent.num_bytes - num_bytes, dst, arrived, meets)

    # For strategies that use several devices

    def time_on(self, devices: Iterable[torch.device]) -> None:
        """Time all further spans by what these devices do, and this rank's own device.

        See ``DeviceTimers.of_all``.
        """
        self.recorder.timer = self.timers.of_all([self.device, *devices])

    # For the code that manages the run

    def start_together(self) -> None:
        """Wait for the other ranks, then make this moment second 0 of the trace on all ranks."""
        # Before the barrier: it takes some 0.1 ms, which is no part of the run.
        self.memory = MemoryMeter(self.device)
        self.board.ranks[self.rank]["origin_s"] = self._host.mark()
        self.transport.barrier()
        if len(self.hosts) > 1:
            # Hosts have clocks of their own, and the barrier ends at about one time on all.
            self.board.ranks[self.rank]["origin_s"] = self._host.mark()
            self.transport.barrier()
        # Ranks of one host read the same clock: the latest arrival is the same on all of them.
        # A GPU's clock is set by it.
        origins_s = self.board.ranks["origin_s"]
        timer = self.timers.of(self.device)
        if isinstance(timer, CudaTimer):
            timer.calibrate()
        self._compares = self._on_gpu and bool(origins_s.all())
        self.recorder = Recorder(self.rank, timer, float(origins_s.max()))
        self.recorder.listener = self.sums = SpanSums(self.board.ranks[self.rank])

    def spans(self) -> list[Span]:
        """This rank's spans so far; waits for its GPU and removes the drift of its clock."""
        return without_drift(self.recorder.spans(), self.recorder.timer)

    def memory_of_part(self, arrived_bytes: int = 0) -> Part:
        """The peak memory of some stretches of the run, counted from now.

        Args:
            arrived_bytes: what the rank holds already and should count, too.
        """
        assert self.memory is not None, "the run has started"
        return self.memory.part(arrived_bytes)

    def leave(self) -> None:
        """Close, and post that this rank has left, so that no rank waits for it any longer."""
        self.close()
        self.board.ranks[self.rank]["state"] = LEFT

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def ended_well(self) -> bool:
        """Whether this session was closed with nothing left in its queue."""
        return self._closed and (self.queue is None or self.queue.is_settled)

    def close(self) -> None:
        """End the session: every later use of the comm is an error."""
        for ending in self.at_close:
            ending()
        self.finish("the end of its run")
        if self.queue is not None:
            self.queue.close()
        if self.transport.ends_together:
            with self.meeting("the end of the run"):
                self.transport.barrier()
        self.transport.close()
        self._closed = True
