"""The session of a ``Comm``: it posts operations on the status board and records their spans.

From the entries a deadlock can be explained. The launcher, the backend and the work queues manage
a comm through its session; strategies and learners never need it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.engine import gpus
from labkit.engine.comm.board import KINDS, LEFT, RECV, SEND, Board
from labkit.engine.comm.deadlock import check_collective, check_message
from labkit.engine.comm.peak_memory import MemoryMeter
from labkit.engine.comm.shared_transport import LOOK_S, why_gone
from labkit.engine.comm.source_lines import caller_location
from labkit.engine.comm.transport import Sent, Transport, describe
from labkit.engine.errors import PeerLostError
from labkit.engine.tracing import ClockTimer, CudaTimer, Recorder, Span
from labkit.schedules.ring import Hosts

# One end of a message: the peer, and the tensor that is sent or received.
End = tuple[int, Tensor]

# How often a loss is fetched from a GPU, for which the host waits.
_LOSS_INTERVAL_S = 0.25
# The longest sleep of a rank that receives from any other, between two looks at the board.
_LONGEST_SLEEP_S = 1e-3
# What is counted for an operation that only receives.
_NOTHING_SENT = Sent()


@dataclass(eq=False)
class Session:
    """One rank's entries on the status board and in the trace.

    Args:
        device: where the rank's tensors live; on a GPU, spans are timed with CUDA events.
        near: the ranks that share the board; none if it is this rank's alone.
        keep_spans: keep only this many spans, the latest; None keeps all.
        hosts: the ranks of each host; an emulated link may show others (``Comm.hosts``).

    ``operations`` counts the calls of send, recv, recv_any and exchange, and the messages inside
    ``streaming``; ``memory`` is made by ``start_together``; ``at_close`` is called at the end.
    """

    rank: int
    device: torch.device
    transport: Transport
    board: Board
    near: Sequence[int]
    keep_spans: InitVar[int | None]
    hosts: Hosts
    memory: MemoryMeter = field(init=False)

    def __post_init__(self, keep_spans: int | None) -> None:
        self.operations = self.barriers = 0
        self._loss_due_s = 0.0
        # Whether starts of operations are compared with those of other ranks after the run.
        self._compares = False
        self.at_close: list[Callable[[], None]] = []
        # By Comm of this run, see ``work.work_queue_of``.
        self.work_queues: dict[Any, Any] = {}
        self._timers: dict[tuple[torch.device, ...], ClockTimer] = {(): ClockTimer()}
        self.recorder = Recorder(self.rank, self.timer_of(self.device), keep=keep_spans)
        self.is_closed = False

    # For the operations of ``Comm``

    def check_open(self) -> None:
        if self.is_closed:
            raise ValueError(
                "this comm is used after the end of its run: start another with labkit.run"
            )

    def announce(self, collective: str) -> None:
        """Post the next collective; MismatchError if another rank has called another one."""
        self.board.announce(self.rank, collective, caller_location())
        check_collective(self.board, self.rank)

    def first_sender(self, landing: Tensor, sources: list[int]) -> int:
        """Return the source whose message has waited longest; wait until there is one.

        Ranks of this host post their messages on the board. From each of the others one message
        like ``landing`` is received ahead. PeerLostError if a source has ended without one.
        """
        started_s = looked_s = time.monotonic()
        near = [source for source in sources if source in self.near]
        far = [source for source in sources if source not in self.near]
        while True:
            now_s = time.monotonic()
            reasons = {}  # by source: why it will send nothing more
            if now_s - looked_s > LOOK_S:
                looked_s = now_s
                reasons = {source: why_gone(self.board, source) for source in sources}
            # After that: a message posted before the end of its source may still arrive.
            since_s = self.board.senders(self.rank, near)
            if far:
                since_s |= self.transport.arrived(landing, far)
            for source, reason in reasons.items():
                if reason and source not in since_s:
                    raise PeerLostError(reason, rank=source)
            if since_s:
                return min(since_s, key=since_s.__getitem__)
            time.sleep(min((now_s - started_s) / 8, _LONGEST_SLEEP_S))

    @contextmanager
    def operation(
        self, op: str, sent: End | None = None, expected: End | None = None, start: Any = None
    ) -> Iterator[Callable[[float], None]]:
        """Wrap a transfer: post it, time it, and name the peer in the error if the peer is lost.

        ``sent`` and ``expected`` are (peer, tensor), ``start`` is the timer's mark at the
        beginning; None means now.

        Yields:
            ``again(moved_s)``, to be called after other operations inside the block: from then on
            the rank is in this one again, and its span begins there. On an emulated link the
            transfer began at ``moved_s``.
        """
        self.check_open()
        board = self.board
        rank = self.rank
        timer = self.recorder.timer
        if start is None:
            start = timer.mark()
        dst, outgoing = sent or (None, None)
        src, incoming = expected or (None, None)
        counter = _NOTHING_SENT if dst is None else self.transport.sent.to[dst]
        bytes_before = counter.num_bytes
        sent_tensor = "" if outgoing is None else describe(outgoing)
        expected_tensor = "" if incoming is None else describe(incoming)
        now_s = time.perf_counter()
        board.enter(rank, op, now_s, caller_location(), dst, src, sent_tensor, expected_tensor)
        if dst is not None:
            check_message(board, SEND, rank, dst)
        if src is not None:
            check_message(board, RECV, src, rank)

        began_s: float | None = None

        def again(moved_s: float) -> None:
            nonlocal start, began_s
            began_s = moved_s
            board.in_operation(rank, op, dst, src)
            start = timer.mark()

        try:
            yield again
            if self.transport.carry is not None:
                self.transport.carry(sent, expected, began_s or time.monotonic())
        except PeerLostError as error:
            peers = [peer for peer in dict.fromkeys((dst, src)) if peer is not None]
            names = " and ".join(f"rank {peer}" for peer in peers)
            lost_rank = peers[0] if len(peers) == 1 else error.rank
            raise PeerLostError(f"{op} with {names} broke off: {error}", lost_rank) from error
        board.leave(rank)
        self.operations += 1
        num_bytes = counter.num_bytes - bytes_before
        # On a GPU it is not known when the peer came: an operation is only queued.
        came_s, late = board.arrived(rank, dst, src)
        if self.device.type == "cuda":
            came_s = None
        messages = self._numbered_messages(dst, src)
        meets = messages if self._compares else ()
        peer = src if dst is None else dst
        self.recorder.transfer(start, timer.mark(), num_bytes, peer, came_s, meets, late, messages)

    def _numbered_messages(self, dst: int | None, src: int | None) -> tuple[Any, ...]:
        """Return (source, destination, number) of the messages just sent and received."""
        messages = []
        if dst is not None:
            messages.append((self.rank, dst, int(self.board.counts[SEND, self.rank, dst])))
        if src is not None:
            messages.append((src, self.rank, int(self.board.counts[RECV, src, self.rank])))
        return tuple(messages)

    def _numbered_meeting(self) -> tuple[int, int, int]:
        """Return the meeting of all ranks that was the latest joint operation."""
        return -1, -1, int(self.board.ranks[self.rank]["joint"])

    @contextmanager
    def joint_operation(self, op: str) -> Iterator[None]:
        """Wrap an operation that every rank has to take part in."""
        self.board.enter_joint(self.rank, op, time.perf_counter())
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
        with self.joint_operation("barrier"):
            self.transport.barrier()
        # A barrier has no payload, so all its time is waiting.
        self.recorder.wait(start, timer.mark(), (self._numbered_meeting(),))
        self.barriers += 1

    @contextmanager
    def streaming(self, name: str, dst: int | None = None) -> Iterator[None]:
        """Wrap a collective of all ranks that writes segments directly into shared memory.

        ``dst`` is the rank that reads them: each message is one operation. None stands for all
        others at once: all messages are one. It is one span, ``all_reduce``.
        """
        sent = self.transport.sent if dst is None else self.transport.sent.to[dst]
        messages_before = sent.messages
        bytes_before = sent.num_bytes
        timer = self.recorder.timer
        start = timer.mark()
        with self.joint_operation(name):
            yield
        num_messages = sent.messages - messages_before
        self.operations += 1 if dst is None else num_messages
        came_s = self.board.joint_arrived_s(self.rank)
        num_bytes = sent.num_bytes - bytes_before
        messages = (self._numbered_meeting(),) * num_messages
        end = timer.mark()
        self.recorder.transfer(
            start, end, num_bytes, dst, came_s, kind="all_reduce", messages=messages
        )

    # For the code that manages the run, and for strategies that use several devices

    def timer_of(self, *devices: torch.device) -> ClockTimer:
        """Return the clock of work that passes through ``devices``: GPU events, or the host's.

        A GPU's events tell when the CPU's work before them has ended, too.
        """
        gpu_devices = tuple(device for device in dict.fromkeys(devices) if device.type == "cuda")
        # Now, and not in the first step, for which the host would have to wait.
        for timed_together in [gpu_devices, *[(gpu,) for gpu in gpu_devices]]:
            if timed_together not in self._timers:
                self._timers[timed_together] = CudaTimer(*timed_together)
        return self._timers[gpu_devices]

    def time_on(self, devices: Iterable[torch.device]) -> None:
        """Time all further spans by what these devices do, and this rank's own device."""
        self.recorder.timer = self.timer_of(self.device, *devices)

    def start_together(self) -> None:
        """Wait for the other ranks, then make this moment second 0 of the trace on all ranks."""
        # Before the barrier: it takes some 0.1 ms, which is no part of the run.
        self.memory = MemoryMeter()
        row = self.board.ranks[self.rank]
        origins_s = self.board.ranks["origin_s"]
        row["origin_s"] = time.perf_counter()
        self.transport.barrier()
        if len(self.hosts) > 1:
            # Hosts have their own clocks, and the barrier ends at about one time on all.
            row["origin_s"] = time.perf_counter()
            self.transport.barrier()
        # Ranks of one host read the same clock, and set a GPU's by it.
        timer = self.timer_of(self.device)
        if isinstance(timer, CudaTimer):
            timer.calibrate()
            self._compares = bool(origins_s.all())
        self.recorder = Recorder(self.rank, timer, float(origins_s.max()))
        self.recorder.listener = SpanSums(row)

    def spans(self) -> list[Span]:
        """Return this rank's spans so far, on the host's clock; wait for its GPU."""
        return self.recorder.spans()

    def report_loss(self, loss: Tensor | float) -> None:
        """Post the loss of a step; one on a GPU at most 4 times a second."""
        on_gpu = isinstance(loss, Tensor) and loss.device.type == "cuda"
        if not on_gpu or time.monotonic() > self._loss_due_s:
            self._loss_due_s = time.monotonic() + _LOSS_INTERVAL_S
            self.board.ranks[self.rank]["loss"] = float(loss)

    def leave(self) -> None:
        """Close, and post that this rank has left, so that no rank waits for it any longer."""
        self.close()
        self.board.ranks[self.rank]["state"] = LEFT

    def close(self) -> None:
        """End the session: every later use of the comm is an error."""
        for callback in self.at_close:
            callback()
        self.transport.close()
        self.is_closed = True


class SpanSums:
    """Sums of the seconds of a rank's spans by kind, kept in its row of the board as it runs.

    What is shown before the end of a run comes from these sums. Threads beside the main one share
    one lane.
    """

    def __init__(self, row: np.void):
        self._names = row["kinds"]
        # A store into a memoryview takes a fraction of the time of a store into an array.
        self._seconds: list[Any] = [memoryview(row["kind_s"][lane]) for lane in range(2)]
        self._until_s: Any = memoryview(row["until_s"])
        self._begun: Any = memoryview(row["begun"])
        self._indices: dict[str, int] = {}

    def begun(self, kind: str | None, lane: int) -> None:
        self._begun[lane > 0] = 0 if kind is None else self._index(kind) + 1

    def ended(self, kind: str, start_s: float, end_s: float, lane: int) -> None:
        self._seconds[lane > 0][self._index(kind)] += end_s - start_s
        self._until_s[lane > 0] = end_s

    def _index(self, kind: str) -> int:
        if kind not in self._indices:
            index = min(len(self._indices), KINDS - 1)
            self._indices[kind] = index
            self._names[index] = kind.encode()
        return self._indices[kind]
