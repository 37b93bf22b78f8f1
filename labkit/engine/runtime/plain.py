"""The values that ranks send over a network: plain data, so that nobody's bytes are executed.

Nobody has checked who is at the other end of a connection. So values and reports become what
``torch.load`` reads with ``weights_only``: tensors, arrays, numbers, texts, containers of them,
and objects of the classes below, or that the program has allowed itself
(``torch.serialization.add_safe_globals``). An error becomes JSON.
"""

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import safe_globals
from torch.utils._pytree import tree_map_only

from labkit.engine.comm.peak_memory import PeakMemory
from labkit.engine.errors import DeadlockError, WorkerError
from labkit.engine.runtime.messages import Report, UnpicklableError, find_unpicklable
from labkit.engine.tracing import Span

# Classes that only hold data, and those of which NumPy's arrays and numbers are made.
_ALLOWED: list[Any] = [
    PeakMemory,
    np.ndarray,
    np.dtype,
    np.zeros(1).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    *{type(np.dtype(kind)) for kind in "?bhilqBHILQefdFD"},
]


def dump_plain(value: Any) -> bytes:
    """Write the value that a rank returns, for ``load_plain``; tensors come to the CPU."""
    try:
        return _dump(value)
    except (Exception, SystemExit):
        culprit = find_unpicklable("value", value, _dump)
        raise UnpicklableError(
            f"{culprit} is not plain data, and nothing else travels between processes that no "
            "launcher of labkit has started. Return tensors, numbers, texts, or lists and dicts "
            "of them; or let every rank allow a class of yours: "
            "torch.serialization.add_safe_globals([Class])"
        ) from None


def _dump(value: Any) -> bytes:
    data = _saved(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value))
    load_plain(data)
    return data


def _saved(value: Any) -> bytes:
    with io.BytesIO() as file:
        torch.save(value, file)
        return file.getvalue()


def load_plain(data: bytes) -> Any:
    """Read a value; never executes anything (UnpicklingError for what is not plain)."""
    with safe_globals(_ALLOWED):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def dump_report(report: Report) -> bytes:
    """Write a report whose value ``dump_plain`` has made."""
    # As JSON, since torch.load would take much longer for thousands of them.
    spans = []
    for span in report.spans:
        spans.append([getattr(span, name) for name in Span.__slots__])
    return _saved(vars(report) | {"spans": json.dumps(spans), "is_plain": True})


def load_report(data: bytes, rank: int) -> Report:
    """Read what ``dump_report`` has made on ``rank``; ConnectionError for anything else."""
    try:
        fields = load_plain(data)
        spans = []
        for *values, meets, messages, call in json.loads(fields["spans"]):
            span = Span(*values, meets=tuple(map(tuple, meets)))
            messages = tuple(map(tuple, messages))
            spans.append(replace(span, messages=messages, call=call and tuple(call)))
        report = Report(**fields | {"spans": tuple(spans)})
        if (report.rank, report.kind, report.is_plain) == (rank, "value", True):
            return report
        problem = f"it is {report.kind!r} of rank {report.rank!r}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    raise ConnectionError(
        f"the report of rank {rank} is not one that labkit writes ({problem}): "
        "is it the same labkit on all hosts, and does no other program write to the run's store "
        "(SECURITY.md)?"
    )


def dump_error(error: WorkerError) -> str:
    """Write an error as JSON; the other ranks raise it, too."""
    kind = type(error).__name__
    return json.dumps([kind, str(error), error.rank, error.location, error.worker_traceback])


def load_error(data: bytes) -> WorkerError:
    """Read what ``dump_error`` has made, without control characters: a terminal obeys them."""
    try:
        kind, text, rank, location, trace = json.loads(data)
        text = _printable(text)
        location = _printable(location)
        trace = _printable(trace)
        if rank is not None and not isinstance(rank, int):
            raise ValueError(f"{rank!r} is no rank")
    except (ValueError, TypeError, RecursionError) as error:
        return WorkerError(f"the run's store holds an error that no rank writes ({error})")
    error_class = DeadlockError if kind == "DeadlockError" else WorkerError
    return error_class(text, rank=rank, location=location, worker_traceback=trace)


def _printable(text: str) -> str:
    characters = []
    for char in text:
        is_harmless = char.isprintable() or char in "\n\t"
        characters.append(char if is_harmless else " ")
    return "".join(characters)
