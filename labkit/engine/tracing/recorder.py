"""The recorder of a rank's spans, and the timers that measure them."""

import itertools
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from labkit.engine.tracing.spans import LOCAL_KINDS, Meeting, Span

# The difference of two events is a float32 of milliseconds: exact to 1 us after so long.
_ANCHORED_S = 10.0
# A peer that seems to arrive so shortly after the end has arrived before it: the clocks of two
# GPUs differ a little.
_CLOCKS_DIFFER_S = 1e-4


class ClockTimer:
    """Marks are host times, suitable for CPU work and for transfers that block the host.

    ``is_past``: whether ``seconds`` of a mark returns without waiting.
    """

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, mark: Any, origin: Any) -> float:
        return mark - origin

    def is_past(self, mark: Any) -> bool:
        return True


class CudaTimer(ClockTimer):
    """Marks are CUDA events on the current stream of each of its GPUs, read as host times.

    Kernels and copies are asynchronous, so a host clock would time their launch. With several
    GPUs a moment is when the last of them has passed its event.

    Source: CUDA Runtime API, "Event Management" (cudaEventElapsedTime: resolution 0.5 us).
    """

    def __init__(self, *devices: Any):
        import torch

        self._cuda = torch.cuda
        self.devices = [torch.device(device) for device in devices]
        # For each GPU an event, and its time on the host's clock.
        self._anchors: list[tuple[Any, float]] = []
        self.calibrate()

    def calibrate(self) -> None:
        """Set the GPUs' clocks by the host's; waits for their streams."""
        self._anchors = []
        for device in self.devices:
            self._cuda.synchronize(device)
        for event in self.mark():
            event.synchronize()
            self._anchors.append((event, time.perf_counter()))

    def mark(self) -> Any:
        streams = map(self._cuda.current_stream, self.devices)
        return [stream.record_event(self._cuda.Event(enable_timing=True)) for stream in streams]

    def is_past(self, mark: Any) -> bool:
        return all(event.query() for event in mark)

    def seconds(self, mark: Any, origin: Any) -> float:
        """Seconds since another mark, or since a host time; waits for their events."""
        return self._host_s(mark) - self._host_s(origin)

    def _host_s(self, mark: Any) -> float:
        if not isinstance(mark, list):
            return mark
        times_s = []
        for index, event in enumerate(mark):
            event.synchronize()
            anchor, anchor_s = self._anchors[index]
            since_s = anchor.elapsed_time(event) / 1e3
            times_s.append(anchor_s + since_s)
            if since_s > _ANCHORED_S:
                self._anchors[index] = (event, times_s[-1])
        return max(times_s)


@dataclass(slots=True)
class _Region:
    """A region that is open in a thread, in which nothing has been recorded since ``resumed``."""

    kind: str
    timer: ClockTimer
    resumed: Any
    messages: tuple[Meeting, ...] = ()

    def at(self, timer: ClockTimer, mark: Any) -> Any:
        """The mark of another timer as one of this region's."""
        return mark if self.timer is timer else self.timer.mark()


class Recorder:
    """Collects one rank's spans; regions may nest, but their spans do not overlap.

    Each thread has its own lane: 0 is the thread that makes the recorder, and autograd's threads,
    which carry out a GPU's part of its backward. A long-running program may ``keep`` only so many.

    A ``listener`` is called for every span: ``begun(kind, lane)`` when a region goes on (None: no
    region), ``ended(kind, start_s, end_s, lane)`` when the device has reached a span's end.
    """

    listener: Any = None

    def __init__(
        self,
        rank: int,
        timer: ClockTimer | None = None,
        origin: Any = None,
        keep: int | None = None,
    ):
        self.rank = rank
        self.timer = timer or ClockTimer()
        self.origin = self.timer.mark() if origin is None else origin
        # Spans whose ends are marks, and those whose ends are seconds since the origin.
        self._ahead: deque[tuple] = deque()
        self._past: deque[tuple] = deque(maxlen=keep)
        self._settle_lock = threading.Lock()
        self._listener_lock = threading.Lock()
        self._open = threading.local()
        self._lanes = itertools.count()
        self._first_stack = self._stack()

    def _stack(self) -> list[_Region]:
        if not hasattr(self._open, "stack"):
            # A thread that Python has not started, inside a backward, is autograd's.
            is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
            if is_foreign and sys.modules["torch"]._C._current_graph_task_id() >= 0:
                self._open.stack = self._first_stack
                self._open.lane = 0
            else:
                self._open.stack = []
                self._open.lane = next(self._lanes)
            self._open.call = None
        return self._open.stack

    def carry_out(self, call: tuple[int, float] | None) -> None:
        """Record this thread's next spans as parts of a call of another thread; None ends it."""
        self._stack()
        self._open.call = call

    @contextmanager
    def waiting_for(self, number: int) -> Iterator[None]:
        """Record the block as waiting for the call with this number: in a ``wait`` region."""
        stack = self._stack()
        with nullcontext() if stack and stack[-1].kind == "wait" else self.region("wait"):
            stack[-1].messages += ((self.rank, self.rank, number),)
            yield

    def _add(
        self,
        timer: ClockTimer,
        kind: str,
        start: Any,
        end: Any,
        num_bytes: int = 0,
        peer: int | None = None,
        meets: tuple[Meeting, ...] = (),
        messages: tuple[Meeting, ...] = (),
    ) -> None:
        fields = kind, num_bytes, peer, self._open.lane, meets, messages, self._open.call
        if type(timer) is ClockTimer:
            # The host's own clock, where spans are short and many, takes no detour.
            self._keep(start - self.origin, end - self.origin, fields)
            return
        self._ahead.append((timer, start, end, fields))
        self.settle(wait=False)

    def settle(self, wait: bool = True) -> None:
        """Turn marks into seconds, and call the listener for each span.

        It waits for a GPU, or else ends with the first span whose end the GPU has not reached.
        """
        with self._settle_lock:
            while self._ahead and (wait or self._ahead[0][0].is_past(self._ahead[0][2])):
                timer, start, end, fields = self._ahead.popleft()
                start_s = timer.seconds(start, self.origin)
                self._keep(start_s, timer.seconds(end, self.origin), fields)

    def _keep(self, start_s: float, end_s: float, fields: tuple) -> None:
        self._past.append((start_s, end_s, fields))
        if self.listener is not None:
            with self._listener_lock:
                self.listener.ended(fields[0], start_s, end_s, fields[3])

    @contextmanager
    def region(self, kind: str, timer: ClockTimer | None = None) -> Iterator[None]:
        """Record the block as ``kind``, except for operations that record their own spans."""
        stack = self._stack()
        timer = timer or self.timer
        outer = stack[-1] if stack else None
        start = timer.mark()
        if outer is not None:
            self._add(outer.timer, outer.kind, outer.resumed, outer.at(timer, start))
        inner = _Region(kind, timer, start)
        stack.append(inner)
        if self.listener is not None:
            self.listener.begun(kind, self._open.lane)
        try:
            yield
        finally:
            end = timer.mark()
            stack.pop()
            self._add(timer, kind, inner.resumed, end, messages=inner.messages)
            if self.listener is not None:
                self.listener.begun(outer.kind if outer else None, self._open.lane)
            if outer is not None:
                outer.resumed = outer.at(timer, end)

    def transfer(
        self,
        start: Any,
        end: Any,
        num_bytes: int,
        peer: int | None,
        arrived: Any = None,
        meets: tuple[Meeting, ...] = (),
        late: int | None = None,
        messages: tuple[Meeting, ...] = (),
        kind: str | None = None,
    ) -> None:
        """Record a transfer: waiting until ``late`` (or the peer) ``arrived``, then moving bytes.

        Its kind is ``kind``, or that of the open region.

        On a GPU ``meets`` tells with what the span is compared after the run (``with_waits``).
        """
        region_kind = self._between(start, end)
        if kind is None:
            kind = region_kind
        if arrived is not None and arrived > start:
            begun = min(arrived, end)
            awaited = peer if late is None else late
            self._add(self.timer, "wait", start, begun, 0, awaited)
            start = begun
        self._add(self.timer, kind, start, end, num_bytes, peer, meets, messages)

    def wait(self, start: Any, end: Any, messages: tuple[Meeting, ...] = ()) -> None:
        """Record that this rank waited for all others, from one mark to another."""
        self._between(start, end)
        self._add(self.timer, "wait", start, end, messages=messages)

    def _between(self, start: Any, end: Any) -> str:
        """Cut the open region for a separate operation; returns the kind of a transfer here."""
        stack = self._stack()
        if not stack:
            return "communicate"
        region = stack[-1]
        self._add(region.timer, region.kind, region.resumed, region.at(self.timer, start))
        region.resumed = region.at(self.timer, end)
        return "communicate" if region.kind in LOCAL_KINDS else region.kind

    def spans(self) -> list[Span]:
        """The spans so far, in seconds since the origin; on a GPU it waits for their ends.

        Spans of length zero are left out, except for messages and the marks of a new step.
        """
        self.settle()
        spans = []
        for start_s, end_s, (kind, num_bytes, peer, lane, meets, messages, call) in self._past:
            if end_s > start_s or num_bytes or meets or messages or kind == "data":
                rest = (num_bytes, peer, lane, meets, messages, call)
                spans.append(Span(self.rank, kind, start_s, end_s, *rest))
        return spans


def with_waits(parts: Iterable[Iterable[Span]]) -> Iterator[Span]:
    """All ranks' spans, those with ``meets`` cut into waiting for the last peer and transfer.

    On a GPU an operation is only queued: it begins on both sides when the stream of the later rank
    has reached it. What the earlier rank's operation lasted before that is ``wait``.
    """
    spans = list(itertools.chain.from_iterable(parts))
    # {meeting: {rank: the second at which its stream has reached it}}
    begun_s: dict[Meeting, dict[int, float]] = defaultdict(dict)
    for span in spans:
        for meeting in span.meets:
            begun_s[meeting][span.rank] = span.start_s
    for span in spans:
        arrived_s = span.start_s
        peer = None
        for meeting in span.meets:
            for rank, at_s in begun_s[meeting].items():
                # A send may end before its receiver has come, if the message fits into buffers.
                buffered = meeting[0] == span.rank and at_s > span.end_s + _CLOCKS_DIFFER_S
                if at_s > arrived_s and not buffered:
                    arrived_s, peer = at_s, rank
        arrived_s = min(arrived_s, span.end_s)
        if arrived_s > span.start_s:
            yield Span(span.rank, "wait", span.start_s, arrived_s, 0, peer, span.lane)
        if arrived_s < span.end_s or span.num_bytes or not span.meets:
            yield replace(span, start_s=arrived_s, meets=())
