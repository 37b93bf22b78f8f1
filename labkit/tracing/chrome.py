"""Chrome traces read back as a ``Trace``: labkit's, and those of PyTorch's profiler.

A file of labkit's (``Trace.save``) holds all ranks of a run, and its spans come back as they were.
PyTorch's profiler (``export_chrome_trace``) writes one file per rank, so several files make one
trace:

* with GPU kernels, NCCL's kernels are communication, all other kernels and copies are computing;
* without, operators (``cpu_op``) are computing, and the collectives of gloo, MPI and labkit are
  communication;
* each ``ProfilerStep`` begins a unit of work.

Where all ranks show equally many collectives, collective number k of one rank is taken to be
number k of all: until the last rank has begun it, the others wait for that rank. Ranks of one
machine share a clock; the files of several machines are only as exact as their clocks.

Source: "Trace Event Format" (Google, 2016), complete events; Kineto's ``output_json.cpp``.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.tracing.spans import Span, Trace
from labkit.units import format_bytes, format_count

# Python needs ten times as much memory as the file has bytes.
MOST_BYTES = 256 * 2**20
_COLLECTIVE = re.compile(r"^(?:gloo|nccl|mpi|ucc|xccl|labkit):|^nccl(?:Dev)?Kernel|^c10d::")
_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_PROFILER = _ON_GPU | {"cpu_op", "user_annotation"}
_OURS = re.compile(r"rank ([0-9]{1,6})(?: · (.{1,200}))?")

Event = dict[str, Any]
# The file's object without its events, and its events.
File = tuple[dict[str, Any], list[Event]]


@dataclass(frozen=True)
class ReadTrace:
    """A trace from files.

    Attributes:
        trace: of the ranks in the files.
        gap: what a rank does where it has no span, in words.
        note: what the files do not show; empty if they have all ranks.
    """

    trace: Trace
    gap: str
    note: str = ""


def read_traces(paths: Sequence[str | Path]) -> ReadTrace:
    """Read the trace of all ranks from one or more files.

    Raises:
        ValueError: a file that is absent, too large, no Chrome trace, cut off, or without spans of
            labkit or PyTorch's profiler; two files of the same rank; files of both kinds.
    """
    files = {str(path): _load(path) for path in paths}
    if any(ours := [path for path, (_, events) in files.items() if _is_ours(events)]):
        if len(paths) > 1:
            raise ValueError(
                f"{ours[0]} is a trace of labkit's, which has all ranks: give that file alone, or "
                "only files of PyTorch's profiler"
            )
        (events,) = (events for _, events in files.values())
        spans = [_our_span(ours[0], event) for event in events if event.get("ph") == "X"]
        return ReadTrace(Trace.merge([spans], _devices(events)), "code outside all spans")
    return _read_profiles(files)


def _read_profiles(files: dict[str, File]) -> ReadTrace:
    """The trace of PyTorch's profiler, from one file per rank."""
    spans: dict[int, list[Span]] = {}
    world_size, on_gpu = 1, False
    for path, (head, events) in files.items():
        note = head.get("distributedInfo")
        note = note if isinstance(note, dict) else {}
        rank = _integer(note.get("rank"), len(spans))
        if rank in spans:
            raise ValueError(f"{path} is the trace of rank {rank}, as is a file before it")
        world_size = max(world_size, _integer(note.get("world_size"), 1))
        spans[rank] = _profiled(path, rank, head, events)
        on_gpu = on_gpu or any(event.get("cat") in _ON_GPU for event in events)
    gap = "a GPU without work" if on_gpu else "code between PyTorch's operators"
    missing = ""
    if len(spans) < world_size:
        have = format_count(len(spans), "rank")
        missing = (
            f"The files have {have} of {world_size}: waiting for the others counts as messages."
        )
    return ReadTrace(_from_zero(Trace.merge(_with_waits(spans).values())), gap, missing)


def _integer(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _load(path: str | Path) -> File:
    """The file's object without its events, and its events that are objects."""
    try:
        text = _read(path)
        content = json.loads(text)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a Chrome trace: its JSON is broken, or cut off ({error})"
        ) from None
    head = content if isinstance(content, dict) else {"traceEvents": content}
    events = head.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError(f"{path} is not a Chrome trace: it has no list of traceEvents")
    found = [event for event in events if isinstance(event, dict)]
    return {key: value for key, value in head.items() if key != "traceEvents"}, found


def _read(path: str | Path) -> bytes:
    with open(path, "rb") as file:
        if file.peek(2)[:2] == b"\x1f\x8b":
            with gzip.open(file) as unpacked:
                data = unpacked.read(MOST_BYTES + 1)
        else:
            data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"{path} holds more than {format_bytes(MOST_BYTES)} of JSON: record fewer steps "
            "(torch.profiler.schedule)"
        )
    return data


def _is_ours(events: list[Event]) -> bool:
    names = _process_names(events)
    return bool(names) and all(_OURS.fullmatch(name) for name in names)


def _process_names(events: list[Event]) -> list[str]:
    args = (
        e.get("args") for e in events if e.get("ph") == "M" and e.get("name") == "process_name"
    )
    return [str(one.get("name")) for one in args if isinstance(one, dict)]


def _devices(events: list[Event]) -> dict[int, str]:
    """The ranks' devices in a trace of labkit's; older ones name none."""
    found = filter(None, map(_OURS.fullmatch, _process_names(events)))
    return {int(match[1]): match[2] for match in found if match[2]}


def _number(path: str, event: Event, name: str) -> float:
    """A time of an event, in microseconds."""
    value = event.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (name == "dur" and value < 0):
        raise ValueError(
            f"{path} is not a Chrome trace: event {str(event.get('name'))[:60]!r} has {name} "
            f"{str(value)[:60]!r}, not a number of microseconds"
        )
    return float(value)


def _our_span(path: str, event: Event) -> Span:
    start_s, seconds = _number(path, event, "ts") / 1e6, _number(path, event, "dur") / 1e6
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    rank, num_bytes = _integer(event.get("pid"), 0), _integer(args.get("num_bytes"), 0)
    peer = args["peer"] if isinstance(args.get("peer"), int) else None
    lane, kind = _integer(event.get("tid"), 0), str(event.get("name"))
    return Span(rank, kind, start_s, start_s + seconds, num_bytes, peer, lane)


def _profiled(path: str, rank: int, head: dict[str, Any], events: list[Event]) -> list[Span]:
    """One rank's spans of computing and communicating, on the common clock."""
    known = [event for event in events if event.get("ph") == "X" and event.get("cat") in _PROFILER]
    if not known:
        raise ValueError(
            f"{path} has no spans of labkit or of PyTorch's profiler: save a run with "
            "result.trace.save(FILE), or a profile with export_chrome_trace(FILE)"
        )
    base_us = head.get("baseTimeNanoseconds")
    base_us = base_us / 1e3 if isinstance(base_us, int | float) else 0.0
    on_gpu = any(event.get("cat") in _ON_GPU for event in known)
    lanes: dict[str, int] = {}
    spans = []
    for event in known:
        if kind := _kind(event, on_gpu):
            start_us = base_us + _number(path, event, "ts")
            end_us = start_us + (0 if kind == "data" else _number(path, event, "dur"))
            lane = lanes.setdefault(str((event.get("pid"), event.get("tid"))), len(lanes))
            spans.append(Span(rank, kind, start_us / 1e6, end_us / 1e6, lane=lane))
    return sorted(spans, key=lambda span: span.start_s)


def _kind(event: Event, on_gpu: bool) -> str:
    """The span's kind for an event of the profiler; empty for one that says nothing more."""
    name, category = str(event.get("name")), event.get("cat")
    if name.startswith("ProfilerStep"):
        return "data"
    if (category in _ON_GPU) != on_gpu:
        return ""
    if _COLLECTIVE.match(name):
        return "communicate"
    return "" if category == "user_annotation" else "compute"


def _with_waits(spans: dict[int, list[Span]]) -> dict[int, list[Span]]:
    """Split collective number k at the moment when the last rank has begun it."""
    calls = {rank: [s for s in mine if s.kind == "communicate"] for rank, mine in spans.items()}
    if len(calls) < 2 or len({len(mine) for mine in calls.values()}) > 1:
        return spans
    split: dict[int, list[Span]] = {
        rank: [s for s in mine if s.kind != "communicate"] for rank, mine in spans.items()
    }
    for together in zip(*calls.values()):
        last = max(together, key=lambda span: span.start_s)
        for span in together:
            met_s = min(last.start_s, span.end_s)
            if met_s > span.start_s:
                wait = Span(span.rank, "wait", span.start_s, met_s, 0, last.rank, span.lane)
                split[span.rank].append(wait)
            rest = Span(span.rank, span.kind, met_s, span.end_s, lane=span.lane)
            split[span.rank].append(rest)
    return split


def _from_zero(trace: Trace) -> Trace:
    """The trace with its first span at second 0: a double has no microseconds of this century."""
    zero_s = trace.spans[0].start_s if trace.spans else 0.0
    return Trace(
        tuple(
            Span(s.rank, s.kind, s.start_s - zero_s, s.end_s - zero_s, 0, s.peer, s.lane)
            for s in trace.spans
        )
    )
