"""Chrome traces read back as a ``Trace``: labkit's, and those of PyTorch's profiler.

A file of labkit's (``Trace.save``) holds all ranks of a run, and its spans come back as they were.
PyTorch's profiler writes one file per rank (``profiler.py``).

Source: "Trace Event Format" (Google, 2016), complete events.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.tracing.load import list_files, load
from labkit.tracing.profiler import join, read_profiles
from labkit.tracing.recorder import with_waits
from labkit.tracing.spans import Span, Trace


def read_traces(paths: Sequence[str | Path]) -> tuple[Trace, str]:
    """The trace of all ranks from one or more files, and what a rank does where it has no span.

    ValueError for any other file.
    """
    return merge_traces({path: load(path) for path in list_files(paths)})[:2]


def merge_traces(contents: dict[Path, Any]) -> tuple[Trace, str, list[str]]:
    """The trace of all ranks, what a rank does where it has no span, and what has to be added."""
    if len(contents) == 1:
        (path, content), *_ = contents.items()
        try:
            spans = _ours(content)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"cannot read {path} as a Chrome trace: {error!r}") from None
        if spans:
            return Trace.merge([spans]), "code outside all spans", []
    profiles, notes = read_profiles(contents)
    gap = "code between PyTorch's operators"
    if any(profile.on_gpu for profile in profiles):
        gap = "a GPU without work"
    trace = replace(Trace.merge([with_waits(join(profiles))]), apart=True)
    return trace, gap, notes


def _ours(content: Any) -> list[Span]:
    """The spans of a file whose processes are ranks of labkit's; none of another file."""
    events = content["traceEvents"] if isinstance(content, dict) else content
    processes = [event for event in events if event and event.get("name") == "process_name"]
    names = [event["args"]["name"] for event in processes]
    if not names or not all(str(name).startswith("rank ") for name in names):
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
        if event["ph"] == "X"
    ]
