"""Spans: the work of each rank over time.

The spans of one lane, a thread of a rank, never overlap: an operation inside a region closes the
region's span, and opens it again. So the seconds by kind add up to the time the lane was busy.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labkit.engine.files import write_atomically

STEP_KINDS = frozenset({"compute", "forward", "backward", "backward_input", "backward_weight"})
# A transfer inside one of these regions is "communicate"; inside any other region (share_reduce,
# share_only, ...) it is a part of that phase and carries its name.
LOCAL_KINDS = STEP_KINDS | {"update", "data", "evaluate"}

# A message by (source, destination, number on this edge), or a meeting of all ranks by
# (-1, -1, number): the same on all ranks that take part.
Meeting = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """One period of time in which one rank did one kind of work.

    ``kind`` is ``compute``, ``communicate``, ``wait``, ``update``, ``data``, ``evaluate`` or the
    name of a communication phase such as ``share_reduce``. ``num_bytes`` are the bytes this rank
    sent in the span; ``peer`` is the rank they went to (or came from, when nothing was
    sent), and of a wait for a message the rank that came last.
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
    # On a GPU: the meetings with other ranks in this span, until ``with_waits`` has compared them.
    meets: tuple[Meeting, ...] = field(default=(), compare=False, repr=False)
    # The messages that it sends and receives. A meeting of all ranks stands here once for each
    # message in it. In a ``wait``: the calls that it waits for, as (rank, rank, number).
    messages: tuple[Meeting, ...] = field(default=(), compare=False, repr=False)
    # In an operation that another thread has called: (the call's number, its second).
    call: tuple[int, float] | None = field(default=None, compare=False, repr=False)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Trace:
    """The spans of all ranks of a run, sorted by start. At second 0 all ranks had started.

    ``devices`` are the ranks' devices by name (``cuda:0``), as far as they are known. ``apart``:
    the recording of each rank began with its own first span. ``about``: the settings of the run
    that ``labkit.what_if`` needs, and ``predicted``, in words, of a trace that was not recorded.
    """

    spans: tuple[Span, ...] = field(default=())
    devices: Mapping[int, str] = field(default_factory=dict, hash=False)
    apart: bool = False
    about: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def merge(
        cls,
        parts: Iterable[Iterable[Span]],
        devices: Mapping[int, str] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> "Trace":
        spans = itertools.chain.from_iterable(parts)
        ordered = sorted(spans, key=lambda span: (span.start_s, span.rank))
        return cls(tuple(ordered), devices or {}, about=about or {})

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
        spans = list(self.spans)
        if rank is not None:
            spans = [span for span in spans if span.rank == rank]
        if kind is not None:
            spans = [span for span in spans if span.kind == kind]
        if lane is not None:
            spans = [span for span in spans if span.lane == lane]
        return spans

    def between(self, start_s: float, end_s: float) -> "Trace":
        """The parts of the spans that lie between two moments."""
        parts = []
        for span in self.spans:
            if span.start_s < end_s and span.end_s > start_s:
                part_start_s = max(span.start_s, start_s)
                part_end_s = min(span.end_s, end_s)
                parts.append(replace(span, start_s=part_start_s, end_s=part_end_s))
        return Trace(tuple(parts), self.devices, self.apart, self.about)

    def seconds_by_kind(
        self, rank: int | None = None, lane: int | None = None
    ) -> dict[str, float]:
        """Seconds spent in each kind, summed over all ranks and lanes, or by one of them."""
        seconds: dict[str, float] = defaultdict(float)
        for span in self.of(rank, lane=lane):
            seconds[span.kind] += span.duration_s
        return dict(seconds)

    def lane(self, rank: int) -> str:
        """The name of a rank's lane: ``rank 0 · cuda:0``, or ``rank 0`` without a device."""
        return " · ".join(filter(None, (f"rank {rank}", self.devices.get(rank))))

    def save(self, path: str | Path) -> Path:
        """Write Chrome trace JSON, one process per rank; https://ui.perfetto.dev opens it."""
        events: list[dict[str, Any]] = []
        for rank in self.ranks:
            name = self.lane(rank)
            if "predicted" in self.about:
                name += " (predicted)"
            named = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
            events.append(named)
        for span in self.spans:
            event: dict[str, Any] = {"ph": "X", "name": span.kind, "cat": span.kind}
            event |= {"pid": span.rank, "tid": span.lane}
            event |= {"ts": span.start_s * 1e6, "dur": span.duration_s * 1e6}
            arguments: dict[str, Any] = {"num_bytes": span.num_bytes, "peer": span.peer}
            if span.messages:
                arguments["messages"] = span.messages
            if span.call:
                arguments["call"] = span.call
            event["args"] = arguments
            events.append(event)
        content = {"traceEvents": events, "displayTimeUnit": "ms", "labkit": dict(self.about)}
        write_atomically(path, json.dumps(content))
        return Path(path)
