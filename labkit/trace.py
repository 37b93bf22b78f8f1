"""Spans: what each rank did and when; the timers that measure them; export as Chrome trace.

The spans of one lane, which is one thread of one rank, never overlap: an operation inside a region
closes the region's span, records its own, and opens the region again. So the seconds by kind add
up to the time the lane was busy.
"""

import itertools
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from labkit.files import write_atomically

# A transfer inside one of these regions is "communicate"; inside any other region (share_reduce,
# share_only, ...) it is a part of that phase and carries its name.
LOCAL_KINDS = frozenset({"compute", "forward", "backward", "update", "data", "evaluate"})


@dataclass(frozen=True, slots=True)
class Span:
    """One period of time in which one rank did one kind of work.

    ``kind`` is ``compute``, ``communicate``, ``wait``, ``update``, ``data``, ``evaluate`` or the
    name of a communication phase such as ``share_reduce``. ``num_bytes`` are the bytes this rank
    sent in the span; ``peer`` is the rank they went to (or came from, when nothing was sent).
    ``lane`` is the thread: 0 is the rank's main thread, 1 and up are other threads, such as DDP's
    communication thread.
    """

    rank: int
    kind: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    peer: int | None = None
    lane: int = 0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Trace:
    """The spans of all ranks of a run, sorted by start. At second 0 all ranks had started.

    ``devices`` are the ranks' devices by name (``cuda:0``), as far as they are known.
    """

    spans: tuple[Span, ...] = field(default=())
    devices: Mapping[int, str] = field(default_factory=dict, hash=False)

    @classmethod
    def merge(
        cls, parts: Iterable[Iterable[Span]], devices: Mapping[int, str] | None = None
    ) -> "Trace":
        spans = (span for part in parts for span in part)
        ordered = sorted(spans, key=lambda span: (span.start_s, span.rank))
        return cls(tuple(ordered), devices or {})

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans})

    @property
    def kinds(self) -> list[str]:
        return sorted({span.kind for span in self.spans})

    def of(
        self, rank: int | None = None, kind: str | None = None, lane: int | None = None
    ) -> list[Span]:
        """The spans of one rank, one kind and one lane; None means all of them."""
        return [
            span
            for span in self.spans
            if (rank is None or span.rank == rank)
            and (kind is None or span.kind == kind)
            and (lane is None or span.lane == lane)
        ]

    def seconds_by_kind(
        self, rank: int | None = None, lane: int | None = None
    ) -> dict[str, float]:
        """Seconds spent in each kind, by one rank or summed over all of them.

        Also summed over lanes: work of two threads at the same time counts twice, so the sum may
        exceed the elapsed time. ``lane=0`` counts the main thread only.
        """
        seconds: dict[str, float] = defaultdict(float)
        for span in self.of(rank, lane=lane):
            seconds[span.kind] += span.duration_s
        return dict(seconds)

    def lane(self, rank: int) -> str:
        """The name of a rank's lane: ``rank 0 · cuda:0``, or ``rank 0`` without a device."""
        return " · ".join(filter(None, (f"rank {rank}", self.devices.get(rank))))

    def save(self, path: str | Path) -> Path:
        """Write Chrome trace JSON, one process per rank; https://ui.perfetto.dev opens it."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": self.lane(rank)}}
            for rank in self.ranks
        ]
        for span in self.spans:
            args = {"num_bytes": span.num_bytes}
            if span.peer is not None:
                args["peer"] = span.peer
            events.append(
                {
                    "ph": "X",
                    "name": span.kind,
                    "cat": span.kind,
                    "pid": span.rank,
                    "tid": span.lane,
                    "ts": span.start_s * 1e6,
                    "dur": span.duration_s * 1e6,
                    "args": args,
                }
            )
        path = Path(path)
        write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        return path


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

    def ended(self, kind: str, start: Any, end: Any, lane: int) -> None:
        """A span from one mark to another has been recorded."""
        ...


class CudaTimer:
    """Marks are CUDA events on the current stream of this rank's device.

    Kernels and copies are asynchronous, so a host clock would time their launch. An event is
    recorded on the stream that does the work and read after one synchronisation at the end.
    """

    def __init__(self, device: Any):
        import torch

        self._torch = torch
        self._device = torch.device(device)

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: Any, origin: Any) -> float:
        mark.synchronize()
        return origin.elapsed_time(mark) / 1e3

    def is_past(self, mark: Any) -> bool:
        return mark.query()


class Recorder:
    """Collects one rank's spans; regions may nest, but their spans do not overlap.

    Each thread has its own lane: 0 is the thread that makes the recorder.

    Attributes:
        listener: hears of every span; None if nobody does.
    """

    listener: Listener | None = None

    def __init__(
        self, rank: int, timer: Timer | None = None, origin: Any = None, keep: int | None = None
    ):
        self.rank = rank
        self.timer: Timer = timer or ClockTimer()
        self.origin = self.timer.mark() if origin is None else origin
        # A long-running program keeps only the latest spans.
        self._raw: deque[tuple] = deque(maxlen=keep)
        self._open = threading.local()
        self._lanes = itertools.count()
        self._stack()

    def _stack(self) -> list[list]:
        if not hasattr(self._open, "stack"):
            self._open.stack, self._open.lane = [], next(self._lanes)
        return self._open.stack

    def _add(
        self, kind: str, start: Any, end: Any, num_bytes: int = 0, peer: int | None = None
    ) -> None:
        self._raw.append((kind, start, end, num_bytes, peer, self._open.lane))
        if self.listener is not None:
            self.listener.ended(kind, start, end, self._open.lane)

    def _begin(self, kind: str | None) -> None:
        if self.listener is not None:
            self.listener.begun(kind, self._open.lane)

    @contextmanager
    def region(self, kind: str) -> Iterator[None]:
        """Record the block as ``kind``, except for operations that record their own spans."""
        stack = self._stack()
        start = self.timer.mark()
        if stack:
            outer = stack[-1]
            self._add(outer[0], outer[1], start)
        stack.append([kind, start])
        self._begin(kind)
        try:
            yield
        finally:
            end = self.timer.mark()
            _, resumed = stack.pop()
            self._add(kind, resumed, end)
            self._begin(stack[-1][0] if stack else None)
            if stack:
                stack[-1][1] = end

    def transfer(self, start, end, num_bytes: int, peer: int | None, arrived=None) -> None:
        """Record a transfer: waiting until the peer ``arrived``, then moving ``num_bytes``."""
        stack = self._stack()
        kind = "communicate"
        if stack:
            region, resumed = stack[-1]
            self._add(region, resumed, start)
            stack[-1][1] = end
            if region not in LOCAL_KINDS:
                kind = region
        if arrived is not None and arrived > start:
            begun = min(arrived, end)
            self._add("wait", start, begun, 0, peer)
            start = begun
        self._add(kind, start, end, num_bytes, peer)

    def spans(self) -> list[Span]:
        """The spans so far, in seconds since the origin, without those of length zero."""
        found = []
        for kind, start, end, *rest in self._raw:
            start_s = self.timer.seconds(start, self.origin)
            end_s = self.timer.seconds(end, self.origin)
            if end_s > start_s or rest[0]:
                found.append(Span(self.rank, kind, start_s, end_s, *rest))
        return found
