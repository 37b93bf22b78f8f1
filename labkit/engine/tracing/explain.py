"""Explain a run from files of labkit's and of other tools: which rank limited it, and what."""

from collections.abc import Sequence
from pathlib import Path

from labkit.engine.tracing import flight_recorder, torchtitan
from labkit.engine.tracing.chrome import merge_traces
from labkit.engine.tracing.limits import what_limited
from labkit.engine.tracing.load import kind_of, list_files, load


def explain(paths: Sequence[str | Path]) -> str:
    """Return what limited the run, or holds it up, that wrote these files or folders.

    Raises:
        ValueError: a file cannot be read or judged, or the files are not of one kind and run.
    """
    contents = {path: load(path) for path in list_files(paths)}
    path_of_kind = {kind_of(path, content): path for path, content in contents.items()}
    kind, *more_kinds = path_of_kind
    if more_kinds:
        listed = " and ".join(f"{kind} ({path})" for kind, path in path_of_kind.items())
        raise ValueError(f"the files are of several kinds, {listed}: give those of one kind")
    match kind:
        case "dumps of PyTorch's debug server":
            return flight_recorder.explain_pages(contents)
        case "flight recorder dumps":
            return flight_recorder.explain_dumps(contents)
        case "torchtitan's structured logs":
            return torchtitan.explain_logs(contents)
    trace, gap, notes = merge_traces(contents)
    return " ".join([str(what_limited(trace, gap=gap)), *notes])
