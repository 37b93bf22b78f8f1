"""The session of a ``Comm``: it posts operations on the status board and records their spans.

``Comm`` moves tensors. For each operation its session makes an entry on the board, from which a
deadlock can be explained, and a span in the trace. The launcher, the backend and the work queues
manage a comm through its session; strategies and learners never need it.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit import gpus
from labkit.comm.board import KINDS, LEFT, RECV, SEND, Board
from labkit.comm.deadlock import check_collective, check_message
from labkit.comm.peak_memory import MemoryMeter, Part
from labkit.comm.source_lines import caller_location
from labkit.comm.transport import Transport
from labkit.comm.waiting import Bell, Doorbells
from labkit.errors import PeerLostError
from labkit.tracing import ClockTimer, CudaTimer, Meeting, Recorder, Span

# One end of a message: the peer, and the description of the tensor that is sent or expected.
End = tuple[int, str]

# How often a loss is fetched from a GPU.
_EVERY_S = 0.25


class Session:
    """One rank's entries on the status board and in the trace.

    Args:
        device: where the rank's tensors live; on a GPU, spans are timed with CUDA events.
        doorbells: wake up a rank in recv_any; None where ranks share no semaphores.
        keep_spans: keep only this many spans, the latest; None keeps all.
        hosts: the ranks of each host; None for one host with all of them.

    Attributes:
        hosts: the ranks of each host; an emulated link may show others (``Comm.hosts``).
        operations: calls of send, recv, recv_any and exchange so far, and the messages inside
            ``streaming``.
        barriers: calls of barrier so far.
        recorder: collects this rank's spans.
        timers: the clocks of the devices that this rank uses.
        loss: takes the losses that this rank reports.
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
        self._on_gpu = device.type == "cuda"
        self.memory: MemoryMeter | None = None
        self.at_close: list[Callable[[], None]] = []
        self._host = ClockTimer()
        self.timers, self.loss = DeviceTimers(), ReportedLoss(board.ranks[rank])
        self.recorder = Recorder(rank, self.timers.of(device), keep=keep_spans)
        self.sums: SpanSums | None = None
        # Whether the starts of operations can be compared with those of other ranks after the run.
        self._compares = False
        self.is_closed = False

    # For the operations of ``Comm``

    def check_open(self) -> None:
        if self.is_closed:
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
        where = caller_location()
        self.board.enter(self.rank, op, self._host.mark(), where, sent, expected)
        if sent:
            check_message(self.board, SEND, self.rank, sent[0])
        if expected:
            check_message(self.board, RECV, expected[0], self.rank)
        if sent:
            self.doorbells.ring(sent[0])

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
        self.board.leave(self.rank)
        self.operations += 1
        num_bytes = leaving.num_bytes - bytes_before if leaving else 0
        arrived = None if self._on_gpu else self.board.arrived_s(self.rank, dst, src)
        meets: tuple[Meeting, ...] = ()
        if self._compares:
            edges = [] if dst is None else [(SEND, self.rank, dst)]
            edges += [] if src is None else [(RECV, src, self.rank)]
            meets = tuple((*edge[1:], int(self.board.counts[edge])) for edge in edges)
        self.record(start, num_bytes, src if dst is None else dst, arrived, meets)

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
        # A rank has come once its queued work has ended, so a clock read after a barrier is right.
        gpus.synchronize(self.device)
        with self.meeting("barrier"):
            self.transport.barrier()
        # A barrier has no payload, so all its time is waiting.
        self.recorder.wait(start, timer.mark())
        self.barriers += 1

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

    # For the code that manages the run, and for strategies that use several devices

    def time_on(self, devices: Iterable[torch.device]) -> None:
        """Time all further spans by what these devices do, and this rank's own device."""
        self.recorder.timer = self.timers.of(self.device, *devices)

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
        """This rank's spans so far, on the host's clock; waits for its GPU."""
        return self.recorder.spans()

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

    def close(self) -> None:
        """End the session: every later use of the comm is an error."""
        for ending in self.at_close:
            ending()
        self.transport.close()
        self.is_closed = True


class DeviceTimers:
    """The clocks of the devices that a rank uses: a GPU's events, or the host's clock."""

    def __init__(self) -> None:
        self._host = ClockTimer()
        self._of_gpus: dict[tuple[torch.device, ...], CudaTimer] = {}

    def of(self, *devices: torch.device) -> ClockTimer:
        """The clock of work that passes through ``devices``.

        Where a GPU is among them, its events tell when the CPU's work before them has ended, too:
        on the CPU nothing is queued.
        """
        gpus = tuple(device for device in dict.fromkeys(devices) if device.type == "cuda")
        if not gpus:
            return self._host
        if gpus not in self._of_gpus:
            # Now, and not in the first step, for which the host would have to wait.
            for some in {gpus, *((gpu,) for gpu in gpus)} - self._of_gpus.keys():
                self._of_gpus[some] = CudaTimer(*some)
        return self._of_gpus[gpus]


class ReportedLoss:
    """Writes losses to a rank's row of the board; a loss on a GPU, without waiting for it."""

    def __init__(self, row: Any):
        self._row = row
        self._fetched_s = -_EVERY_S
        # A loss on its way from a GPU, and the event of its arrival.
        self._coming: tuple[Tensor, torch.Event] | None = None

    def report(self, loss: Tensor | float) -> None:
        """Write ``loss``; from a GPU when it has come, at most 4 times a second."""
        if not (isinstance(loss, Tensor) and loss.device.type == "cuda"):
            self._row["loss"] = float(loss)
            return
        if self._coming is not None and self._coming[1].query():
            self._row["loss"] = float(self._coming[0])
            self._coming = None
        now_s = time.perf_counter()
        if self._coming is None and now_s - self._fetched_s > _EVERY_S:
            self._fetched_s = now_s
            # Into pinned memory: the host goes on, and looks at it in a later step.
            landing = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
            landing.copy_(loss.detach(), non_blocking=True)
            self._coming = landing, torch.cuda.current_stream(loss.device).record_event()


class SpanSums:
    """Adds up the seconds of a rank's spans by kind, in its row of the board, while it runs.

    What is shown before the end of a run comes from these sums: the launcher reads them some times
    a second. Threads beside the main one share one lane.
    """

    def __init__(self, row: np.void):
        self._names = row["kinds"]
        # A store into a memoryview takes a fraction of the time of a store into an array.
        self._seconds: list[Any] = [memoryview(row["kind_s"][lane]) for lane in range(2)]
        self._until_s: Any = memoryview(row["until_s"])
        self._begun: Any = memoryview(row["begun"])
        self._places: dict[str, int] = {}

    def begun(self, kind: str | None, lane: int) -> None:
        self._begun[lane > 0] = 0 if kind is None else self._place(kind) + 1

    def ended(self, kind: str, start_s: float, end_s: float, lane: int) -> None:
        self._seconds[lane > 0][self._place(kind)] += end_s - start_s
        self._until_s[lane > 0] = end_s

    def so_far(self, main_lane_only: bool = False) -> dict[str, float]:
        """Seconds by kind of the spans that have ended, in all lanes or in the main one."""
        lanes = self._seconds[:1] if main_lane_only else self._seconds
        return {kind: sum(s[place] for s in lanes) for kind, place in list(self._places.items())}

    def _place(self, kind: str) -> int:
        place = self._places.get(kind)
        if place is None:
            place = self._places[kind] = min(len(self._places), KINDS - 1)
            self._names[place] = kind.encode()
        return place
