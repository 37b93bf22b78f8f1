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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.files import check_regular
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
    for path, (_, events) in files.items():
        lanes = [_OURS.fullmatch(name) for name in _process_names(events)]
        if lanes and all(lanes):
            if len(paths) > 1:
                raise ValueError(
                    f"{path} is a trace of labkit's, which has all ranks: give that file alone, "
                    "or only files of PyTorch's profiler"
                )
            devices = {int(one[1]): one[2] for one in lanes if one and one[2]}
            spans = [_our_span(path, event) for event in events if event.get("ph") == "X"]
            return ReadTrace(Trace.merge([spans], devices), "code outside all spans")
    return _read_profiles(files)


def _load(path: str | Path) -> File:
    """The file's object without its events, and its events that are objects."""
    try:
        check_regular(path)
        with open(path, "rb") as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            with gzip.open(file) if packed else file as unpacked:
                data = unpacked.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise OSError(
                f"it holds more than {format_bytes(MOST_BYTES)} of JSON. Record fewer steps "
                "(torch.profiler.schedule)"
            )
        content = json.loads(data)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read {path}: {why}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a Chrome trace: its JSON is broken, or cut off ({error})"
        ) from None
    head = content if isinstance(content, dict) else {"traceEvents": content}
    events = head.pop("traceEvents", None)
    if not isinstance(events, list):
        raise ValueError(f"{path} is not a Chrome trace: it has no list of traceEvents")
    return head, [event for event in events if isinstance(event, dict)]


def _process_names(events: list[Event]) -> list[str]:
    named = [e for e in events if e.get("ph") == "M" and e.get("name") == "process_name"]
    return [str(e["args"].get("name")) for e in named if isinstance(e.get("args"), dict)]


def _integer(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


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
    args = event["args"] if isinstance(event.get("args"), dict) else {}
    rank, num_bytes = _integer(event.get("pid"), 0), _integer(args.get("num_bytes"), 0)
    peer = args["peer"] if isinstance(args.get("peer"), int) else None
    lane, kind = _integer(event.get("tid"), 0), str(event.get("name"))
    return Span(rank, kind, start_s, start_s + seconds, num_bytes, peer, lane)


def _read_profiles(files: dict[str, File]) -> ReadTrace:
    """The trace of PyTorch's profiler, from one file per rank."""
    spans: dict[int, list[Span]] = {}
    world_size, gap = 1, "code between PyTorch's operators"
    for path, (head, events) in files.items():
        info = head.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        rank = _integer(info.get("rank"), len(spans))
        if rank in spans:
            raise ValueError(f"{path} is the trace of rank {rank}, as is a file before it")
        world_size = max(world_size, _integer(info.get("world_size"), 1))
        known = [e for e in events if e.get("ph") == "X" and e.get("cat") in _PROFILER]
        if not known:
            raise ValueError(
                f"{path} has no spans of labkit or of PyTorch's profiler: save a run with "
                "result.trace.save(FILE), or a profile with export_chrome_trace(FILE)"
            )
        base_ns = head.get("baseTimeNanoseconds")
        base_us = base_ns / 1e3 if isinstance(base_ns, int | float) else 0.0
        on_gpu = any(event.get("cat") in _ON_GPU for event in known)
        gap = "a GPU without work" if on_gpu else gap
        lanes: dict[str, int] = {}
        spans[rank] = []
        for event in known:
            if kind := _kind(event, on_gpu):
                start_us = base_us + _number(path, event, "ts")
                end_us = start_us + (0 if kind == "data" else _number(path, event, "dur"))
                lane = lanes.setdefault(str((event.get("pid"), event.get("tid"))), len(lanes))
                spans[rank].append(Span(rank, kind, start_us / 1e6, end_us / 1e6, lane=lane))
        spans[rank].sort(key=lambda span: span.start_s)
    missing = ""
    if len(spans) < world_size:
        have = format_count(len(spans), "rank")
        missing = (
            f"The files have {have} of {world_size}: waiting for the others counts as messages."
        )
    merged = Trace.merge(_with_waits(spans).values()).spans
    # From second 0 on: a double has no microseconds of this century.
    zero_s = merged[0].start_s if merged else 0.0
    moved = (replace(s, start_s=s.start_s - zero_s, end_s=s.end_s - zero_s) for s in merged)
    return ReadTrace(Trace(tuple(moved)), gap, missing)


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
    split = {rank: [s for s in mine if s.kind != "communicate"] for rank, mine in spans.items()}
    for together in zip(*calls.values()):
        last = max(together, key=lambda span: span.start_s)
        for span in together:
            met_s = min(last.start_s, span.end_s)
            if met_s > span.start_s:
                wait = replace(span, kind="wait", end_s=met_s, peer=last.rank)
                split[span.rank].append(wait)
            split[span.rank].append(replace(span, start_s=met_s))
    return split
