"""How a rank records its spans, and the timers that measure them."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from labkit.tracing.spans import LOCAL_KINDS, Meeting, Span

# How far a GPU's event may be from the one that its time is counted from: a float32 of 0.1 s in
# milliseconds is exact to 4 ns.
_ANCHORED_S = 0.1
# Number of unread events after which the first is asked whether the GPU has passed it.
_READ_AT = 64
# Number of spans that are kept as marks while nobody listens.
_SETTLE_AT = 256
_COMPARISONS = 9
# The clocks of GPUs and hosts drift by some 1e-5.
_MOST_DRIFT = 1e-3


class Timer(Protocol):
    """A clock for spans. A mark is a moment, of a type that only the timer interprets."""

    def mark(self) -> Any: ...

    def seconds(self, mark: Any, origin: Any) -> float: ...

    def is_past(self, mark: Any) -> bool:
        """Whether ``seconds`` of this mark returns without waiting."""
        ...


class ClockTimer:
    """Marks are host times, suitable for CPU work and for transfers that block the host."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float, origin: float) -> float:
        return mark - origin

    def is_past(self, mark: float) -> bool:
        return True


class Listener(Protocol):
    """Hears of a recorder's spans as they begin and end."""

    def begun(self, kind: str | None, lane: int) -> None:
        """A region of this kind goes on from now on; None: no region."""
        ...

    def ended(self, kind: str, start_s: float, end_s: float, lane: int) -> None:
        """A span has ended; on a GPU, it is heard of once the device has reached its end."""
        ...


@dataclass(slots=True)
class CudaMark:
    """A moment on a GPU's stream: an event until the GPU is known to have passed it, then a time.

    Attributes:
        timer: which has made it.
        event: None once ``host_s`` is known.
        host_s: on the host's clock, in seconds.
    """

    timer: "CudaTimer"
    event: Any
    host_s: float = 0.0


class CudaTimer:
    """Marks are CUDA events on the current stream of one GPU, told in seconds of the host's clock.

    Kernels and copies are asynchronous, so a host clock would time their launch. An event is
    recorded on the stream that does the work. The difference of two events is a float32 of
    milliseconds: 0.25 ms of resolution after an hour. So each event is measured from one that is
    at most 0.1 s older (or from its predecessor, after a longer pause), and the times are added
    up in float64. An event that the GPU has passed is read, and used again: a query never waits.

    The GPU's clock is set by the host's: of some events on the idle stream, the one with the
    least time between its record and its return on the host counts as recorded in the middle of
    this time. So the clocks of the ranks of one machine agree to some 10 us at the calibration;
    ``rate`` tells how they drift apart, some 10 us per second.

    Source: CUDA Runtime API, "Event Management" (cudaEventElapsedTime: resolution 0.5 us).
    """

    def __init__(self, device: Any):
        import torch

        self._torch = torch
        self.device = torch.device(device)
        self._free: list[Any] = []
        self._unread: deque[CudaMark] = deque()
        # Several threads of a rank may make marks; a mark may be read by another thread.
        self._reading = threading.RLock()
        # An event, and its time on the host's clock.
        self._anchor: tuple[Any, float] = (None, 0.0)
        self._set_s = self._set_within_s = 0.0

    def calibrate(self) -> None:
        """Set the GPU's clock by the host's; waits until the stream is idle."""
        with self._reading:
            self._read(wait=True)
            event, self._set_s, self._set_within_s = self._compared()
            self._anchor = event, self._set_s

    def mark(self) -> CudaMark:
        with self._reading:
            if self._anchor[0] is None:
                self.calibrate()
            elif len(self._unread) >= _READ_AT:
                self._read()
            mark = CudaMark(self, self._recorded())
            self._unread.append(mark)
            return mark

    def seconds(self, mark: Any, origin: Any) -> float:
        """Seconds between two marks of any GPU timers, or host times; waits for their events."""
        return _host_s(mark) - _host_s(origin)

    def is_past(self, mark: CudaMark) -> bool:
        with self._reading:
            self._read()
            return mark.event is None

    def read(self, mark: CudaMark) -> float:
        """The host's time of one of this timer's marks; waits for its event."""
        with self._reading:
            self._read()
            if mark.event is not None:
                self._read(wait=True)
            return mark.host_s

    def rate(self) -> float:
        """Seconds of the host's clock per second of the GPU's since the calibration.

        1 if they differ by less than can be told. Waits until the stream is idle.
        """
        with self._reading:
            self._read(wait=True)
            event, now_s, within_s = self._compared()
            anchor, anchor_s = self._anchor
            passed_s = anchor_s + anchor.elapsed_time(event) / 1e3 - self._set_s
            self._free.append(event)
        real_s = now_s - self._set_s
        if passed_s <= 0 or abs(real_s - passed_s) <= within_s + self._set_within_s:
            return 1.0
        rate = real_s / passed_s
        # Crystals drift by millionths: a larger difference is no drift.
        return rate if abs(rate - 1) < _MOST_DRIFT else 1.0

    def _compared(self) -> tuple[Any, float, float]:
        """An event, when it was recorded on the host's clock, and how exactly that is known."""
        self._wait(self._recorded())
        found = []
        for _ in range(_COMPARISONS):
            before_s = time.perf_counter()
            event = self._recorded()
            event.synchronize()
            within_s = (time.perf_counter() - before_s) / 2
            found.append((within_s, before_s + within_s, event))
        (within_s, middle_s, event), *others = sorted(found, key=lambda one: one[0])
        self._free += [other for *_, other in others]
        return event, middle_s, within_s

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self.device))
        return event

    def _wait(self, event: Any) -> None:
        event.synchronize()
        self._free.append(event)

    def _read(self, wait: bool = False) -> None:
        """Turn events into times, in the order of their marks, up to the first still to come."""
        while self._unread and (wait or self._unread[0].event.query()):
            mark = self._unread.popleft()
            event = mark.event
            if wait:
                event.synchronize()
            anchor, anchor_s = self._anchor
            since_s = anchor.elapsed_time(event) / 1e3
            mark.host_s, mark.event = anchor_s + since_s, None
            if since_s > _ANCHORED_S:
                self._anchor, event = (event, mark.host_s), anchor
            self._free.append(event)


class JointTimer:
    """One clock for work that passes through several GPUs: a mark is an event on each of them.

    Its moment is when the last of them has passed its event. So a span lasts from the end of all
    earlier work until all work of its region has ended, whichever GPUs do it.
    """

    def __init__(self, timers: Sequence[CudaTimer]):
        self._timers = timers

    def mark(self) -> tuple[CudaMark, ...]:
        return tuple(timer.mark() for timer in self._timers)

    def seconds(self, mark: Any, origin: Any) -> float:
        return _host_s(mark) - _host_s(origin)

    def is_past(self, mark: tuple[CudaMark, ...]) -> bool:
        return all(timer.is_past(one) for timer, one in zip(self._timers, mark))

    def rate(self) -> float:
        return self._timers[0].rate()


def _host_s(mark: Any) -> float:
    """A mark of a GPU timer, or a host time, as a time on the host's clock."""
    if isinstance(mark, CudaMark):
        return mark.timer.read(mark)
    return max(map(_host_s, mark)) if isinstance(mark, tuple) else mark


class _Region:
    """A region that is open in a thread.

    Attributes:
        kind: of its spans.
        timer: of its spans.
        resumed: the mark since which nothing inside it has been recorded.
        is_cut: whether anything inside it has been recorded.
    """

    __slots__ = ("is_cut", "kind", "resumed", "timer")

    def __init__(self, kind: str, timer: Timer, start: Any):
        self.kind, self.timer, self.resumed = kind, timer, start
        self.is_cut = False


class Recorder:
    """Collects one rank's spans; regions may nest, but their spans do not overlap.

    Each thread has its own lane: 0 is the thread that makes the recorder, and autograd's threads,
    which carry out a GPU's part of its backward while it waits for them.

    Attributes:
        timer: of all spans, except for regions with their own.
        listener: hears of every span; None if nobody does.
    """

    listener: Listener | None = None

    def __init__(
        self, rank: int, timer: Timer | None = None, origin: Any = None, keep: int | None = None
    ):
        self.rank = rank
        self.timer: Timer = timer or ClockTimer()
        self.origin = self.timer.mark() if origin is None else origin
        # Spans whose ends are marks, and those whose ends are seconds since the origin.
        self._ahead: deque[tuple] = deque()
        # A long-running program keeps only the latest spans.
        self._past: deque[tuple] = deque(maxlen=keep)
        self._settling, self._telling = threading.Lock(), threading.Lock()
        self._open = threading.local()
        self._lanes = itertools.count()
        self._first_stack = self._stack()

    def _stack(self) -> list[_Region]:
        if not hasattr(self._open, "stack"):
            if _is_thread_of_autograd():
                self._open.stack, self._open.lane = self._first_stack, 0
            else:
                self._open.stack, self._open.lane = [], next(self._lanes)
        return self._open.stack

    def _add(
        self,
        timer: Timer,
        kind: str,
        start: Any,
        end: Any,
        num_bytes: int = 0,
        peer: int | None = None,
        meets: tuple[Meeting, ...] = (),
        is_empty: bool = False,
    ) -> None:
        fields = kind, num_bytes, peer, self._open.lane, meets, is_empty
        if type(timer) is ClockTimer and type(self.origin) is float:
            # The host's own clock, where spans are short and many, takes no detour.
            self._keep(start - self.origin, end - self.origin, fields)
            return
        self._ahead.append((timer, start, end, fields))
        if self.listener is not None or len(self._ahead) >= _SETTLE_AT:
            self._settle()

    def _settle(self, wait: bool = False) -> None:
        """Turn marks into seconds, up to the first span whose end a GPU has not reached."""
        with self._settling:
            while self._ahead and (wait or self._ahead[0][0].is_past(self._ahead[0][2])):
                timer, start, end, fields = self._ahead.popleft()
                start_s = timer.seconds(start, self.origin)
                self._keep(start_s, timer.seconds(end, self.origin), fields)

    def _keep(self, start_s: float, end_s: float, fields: tuple) -> None:
        self._past.append((start_s, end_s, fields))
        if self.listener is not None:
            with self._telling:
                self.listener.ended(fields[0], start_s, end_s, fields[3])

    def _cut(self, region: _Region, start: Any) -> None:
        self._add(region.timer, region.kind, region.resumed, start)
        region.is_cut = True

    def _begin(self, kind: str | None) -> None:
        if self.listener is not None:
            self.listener.begun(kind, self._open.lane)

    @contextmanager
    def region(self, kind: str, timer: Timer | None = None) -> Iterator[None]:
        """Record the block as ``kind``, except for operations that record their own spans."""
        stack, timer = self._stack(), timer or self.timer
        outer = stack[-1] if stack else None
        start = timer.mark()
        if outer is not None:
            self._cut(outer, start if outer.timer is timer else outer.timer.mark())
        inner = _Region(kind, timer, start)
        stack.append(inner)
        self._begin(kind)
        try:
            yield
        finally:
            end = timer.mark()
            stack.pop()
            # An empty region marks a moment, even if a GPU reaches both ends at the same time.
            self._add(timer, kind, inner.resumed, end, is_empty=not inner.is_cut)
            self._begin(outer.kind if outer else None)
            if outer is not None:
                outer.resumed = end if outer.timer is timer else outer.timer.mark()

    def transfer(
        self,
        start: Any,
        end: Any,
        num_bytes: int,
        peer: int | None,
        arrived: Any = None,
        meets: tuple[Meeting, ...] = (),
    ) -> None:
        """Record a transfer: waiting until the peer ``arrived``, then moving ``num_bytes``.

        On a GPU it is not known yet when the peer arrived: ``meets`` tells with what the span is
        compared after the run.
        """
        kind = self._between(start, end)
        if arrived is not None and arrived > start:
            begun = min(arrived, end)
            self._add(self.timer, "wait", start, begun, 0, peer)
            start = begun
        self._add(self.timer, kind, start, end, num_bytes, peer, meets)

    def wait(self, start: Any, end: Any) -> None:
        """Record that this rank waited for all others, from one mark to another."""
        self._between(start, end)
        self._add(self.timer, "wait", start, end)

    def _between(self, start: Any, end: Any) -> str:
        """Cut the open region for an operation of its own; returns the kind of a transfer here."""
        stack = self._stack()
        if not stack:
            return "communicate"
        region, same = stack[-1], stack[-1].timer is self.timer
        self._cut(region, start if same else region.timer.mark())
        region.resumed = end if same else region.timer.mark()
        return "communicate" if region.kind in LOCAL_KINDS else region.kind

    def settle(self) -> None:
        """Let the listener hear of all spans so far; on a GPU it waits for their ends."""
        self._settle(wait=True)

    def spans(self) -> list[Span]:
        """The spans so far, in seconds since the origin; on a GPU it waits for their ends.

        Spans of length zero are left out, except for messages and empty regions.
        """
        self.settle()
        return [
            Span(self.rank, kind, start_s, end_s, num_bytes, peer, lane, meets)
            for start_s, end_s, (kind, num_bytes, peer, lane, meets, is_empty) in self._past
            if end_s > start_s or num_bytes or meets or is_empty
        ]


def _is_thread_of_autograd() -> bool:
    """Whether this thread was not started in Python, and is inside a backward."""
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return False
    import torch

    return torch._C._current_graph_task_id() >= 0
