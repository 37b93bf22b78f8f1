"""Chrome traces read back as a ``Trace``: labkit's, and those of PyTorch's profiler.

A file of labkit's (``Trace.save``) holds all ranks of a run, and its spans come back as they were.
PyTorch's profiler (``export_chrome_trace``) writes one file per rank. With GPU kernels, NCCL's are
communication, all other kernels and copies are computing; without, operators (``cpu_op``) are
computing, and collectives communication. Each ``ProfilerStep`` begins a unit of work.

Where all ranks show equally many collectives, collective number k of one rank is taken to be
number k of all: until the last rank has begun it, the others wait for that rank. The files of
several machines are only as exact as their clocks.

Source: "Trace Event Format" (Google, 2016), complete events; Kineto's ``output_json.cpp``.
"""

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.files import check_regular
from labkit.tracing.recorder import with_waits
from labkit.tracing.spans import Span, Trace

_COLLECTIVE = re.compile(r"^(?:gloo|nccl|mpi|ucc|xccl|labkit):|^nccl(?:Dev)?Kernel|^c10d::")
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


def read_traces(paths: Sequence[str | Path]) -> tuple[Trace, str]:
    """The trace of all ranks from one or more files, and what a rank does where it has no span.

    ValueError for any other file.
    """
    spans: dict[int, list[Span]] = {}
    gap = "code between PyTorch's operators"
    for path in paths:
        check_regular(path)
        try:
            with open(path, "rb") as file:
                packed = file.peek(2)[:2] == b"\x1f\x8b"
                with gzip.open(file) if packed else file as unpacked:
                    head = json.load(unpacked)
            head = head if isinstance(head, dict) else {"traceEvents": head}
            if len(paths) == 1 and (ours := _ours(head["traceEvents"])):
                return Trace.merge([ours]), "code outside all spans"
            rank = head.get("distributedInfo", {}).get("rank", len(spans))
            mine, on_gpu = _profiled(rank, head["traceEvents"])
        except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"cannot read {path} as a Chrome trace: {error!r}") from None
        if not mine or rank in spans:
            why = f"is rank {rank} again" if mine else "has no spans of PyTorch's profiler"
            raise ValueError(f"{path} {why}: give one file of labkit's, or a profile per rank")
        spans[rank] = mine
        gap = "a GPU without work" if on_gpu else gap
    calls = [[s for s in mine if s.kind == "communicate"] for mine in spans.values()]
    if len({len(mine) for mine in calls}) == 1:
        for mine in spans.values():
            numbers = itertools.count()
            mine[:] = [
                replace(s, meets=((-1, -1, next(numbers)),)) if s.kind == "communicate" else s
                for s in mine
            ]
    return Trace.merge([with_waits(spans.values())]), gap


def _ours(events: list[dict[str, Any]]) -> list[Span]:
    """The spans of a file whose processes are ranks of labkit's; none of another file."""
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    if not all(str(name).startswith("rank ") for name in names):
        return []
    return [
        Span(
            event["pid"],
            event["name"],
            event["ts"] / 1e6,
            event["ts"] / 1e6 + event["dur"] / 1e6,
            event["args"]["num_bytes"],
            event["args"].get("peer"),
            event["tid"],
        )
        for event in events
        if names and event["ph"] == "X"
    ]


def _profiled(rank: int, events: list[dict[str, Any]]) -> tuple[list[Span], bool]:
    """The spans of a rank from its profile, and whether they are those of its GPU."""
    on_gpu = any(event.get("cat") in _ON_GPU for event in events)
    lanes: dict[Any, int] = {}
    spans = []
    for event in events:
        name, category = event["name"], event.get("cat")
        if name.startswith("ProfilerStep") and event["ph"] == "X":
            kind = "data"
        elif category not in (_ON_GPU if on_gpu else ("cpu_op", "user_annotation")):
            continue
        elif _COLLECTIVE.match(name):
            kind = "communicate"
        elif category == "user_annotation":
            continue
        else:
            kind = "compute"
        start_us, seconds = event["ts"], 0.0 if kind == "data" else event["dur"] / 1e6
        lane = lanes.setdefault((event["pid"], event["tid"]), len(lanes))
        spans.append(Span(rank, kind, start_us / 1e6, start_us / 1e6 + seconds, lane=lane))
    return sorted(spans, key=lambda span: span.start_s), on_gpu
