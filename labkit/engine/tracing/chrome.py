"""Chrome traces read back as a ``Trace``: labkit's, and those of PyTorch's profiler.

A file of labkit's (``Trace.save``) holds all ranks of a run, and its spans come back as they were.
PyTorch's profiler writes one file per rank (``profiler.py``).

Source: "Trace Event Format" (Google, 2016), complete events.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.engine.tracing.load import kind_of, list_files, load
from labkit.engine.tracing.profiler import join, read_profiles, uncompared
from labkit.engine.tracing.recorder import with_waits
from labkit.engine.tracing.spans import Span, Trace


def read_traces(paths: Sequence[str | Path]) -> tuple[Trace, str]:
    """Return the trace of all ranks, and a name for what a rank does where it has no span.

    ValueError for any other file.
    """
    contents = {path: load(path) for path in list_files(paths)}
    for path, content in contents.items():
        kind = kind_of(path, content)
        if kind != "traces":
            raise ValueError(f"{path} is no trace, but of another kind: {kind}")
    return merge_traces(contents)[:2]


def merge_traces(contents: dict[Path, Any]) -> tuple[Trace, str, list[str]]:
    """The trace of all ranks; in words, the work of a rank without a span; and further notes."""
    for path, content in contents.items():
        try:
            spans = _own_spans(content)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"cannot read {path} as a Chrome trace: {error!r}") from None
        if spans and len(contents) > 1:
            raise ValueError(f"{path} is labkit's trace of all ranks of a run: give it alone")
        if spans:
            about = content.get("labkit") if isinstance(content, dict) else None
            trace = Trace.merge([spans], about=about)
            notes = []
            if "predicted" in trace.about:
                notes.append(f"This is a prediction: {trace.about['predicted']}.")
            return trace, "code outside all spans", notes
    profiles, notes = read_profiles(contents)
    gap = "code between PyTorch's operators"
    if any(profile.on_gpu for profile in profiles):
        gap = "a GPU without work"
    trace = replace(Trace.merge([with_waits(join(profiles))]), apart=True)
    if not notes:
        notes = [note for note in [uncompared(profiles)] if note]
    return trace, gap, notes


def _own_spans(content: Any) -> list[Span]:
    """The spans of a file whose processes are ranks of labkit's; none of another file."""
    events = content["traceEvents"] if isinstance(content, dict) else content
    has_ranks = False
    for event in events:
        if event and event.get("name") == "process_name":
            has_ranks = str(event["args"]["name"]).startswith("rank ")
            if not has_ranks:
                return []
    spans = []
    for event in events:
        if has_ranks and event["ph"] == "X":
            start_s = event["ts"] / 1e6
            end_s = start_s + event["dur"] / 1e6
            num_bytes = event["args"]["num_bytes"]
            peer = event["args"].get("peer")
            messages = tuple(map(tuple, event["args"].get("messages", ())))
            call = event["args"].get("call")
            span = Span(event["pid"], event["name"], start_s, end_s, num_bytes, peer, event["tid"])
            spans.append(replace(span, messages=messages, call=call and tuple(call)))
    return spans
