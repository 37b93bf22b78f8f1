"""The reports of the ranks of several hosts: plain data, so that nobody's bytes are executed.

Within a host reports are pickles, in memory that nobody else can open. Between hosts they travel
over connections whose other end nobody has checked. So a report becomes JSON, and the value in it
what ``torch.load`` reads with ``weights_only``: tensors, arrays, numbers, texts, containers of
them, and objects of the classes below, or that the program has allowed itself
(``torch.serialization.add_safe_globals``).
"""

import io
import json
import struct
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import safe_globals
from torch.utils._pytree import tree_map_only

from labkit.comm.meeting import SUSPICION
from labkit.comm.peak_memory import DeviceMemory, PeakMemory
from labkit.runtime.messages import Report, UnpicklableError, find_unpicklable
from labkit.tracing import Span

# What the packages above the runtime let their ranks return: classes that only hold data.
PLAIN: list[Any] = [PeakMemory, DeviceMemory]
# What NumPy's arrays and numbers are made of.
_KINDS_OF_NUMBERS = "?bhilqBHILQefdFD"
_OF_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    np.zeros(1).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    *{type(np.dtype(kind)) for kind in _KINDS_OF_NUMBERS},
]
_LENGTH = struct.Struct("!Q")
# The types of a report's fields as JSON; those of a span are checked when it is made.
_TYPES: dict[Any, Any] = {str: str, int: int, float: (int, float)}


def dump_plain(value: Any) -> bytes:
    """The value that a rank returns, as ``load_plain`` reads it; tensors come to the CPU.

    Raises:
        UnpicklableError: names the part that is no plain data.
    """
    try:
        return _dump(value)
    except (Exception, SystemExit):
        culprit = find_unpicklable("value", value, _dump)
        raise UnpicklableError(
            f"{culprit} is not plain data, and nothing else travels between hosts. Return "
            "tensors, numbers, texts, or lists and dicts of them; or let every rank allow a class "
            "of yours: torch.serialization.add_safe_globals([Class])"
        ) from None


def _dump(value: Any) -> bytes:
    plain = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
    with io.BytesIO() as file:
        torch.save(plain, file)
        data = file.getvalue()
    load_plain(data)
    return data


def load_plain(data: bytes) -> Any:
    """The value in ``data``; never executes anything.

    Raises:
        pickle.UnpicklingError: it holds something else than plain data.
    """
    with safe_globals([*PLAIN, *_OF_NUMPY]):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def to_bytes(report: Report) -> bytes:
    """A report whose value ``dump_plain`` has made."""
    told = {field.name: getattr(report, field.name) for field in fields(Report)}
    names = [field.name for field in fields(Span)]
    del told["is_plain"]
    told["spans"] = [[getattr(span, name) for name in names] for span in report.spans]
    told["peak_memory"] = report.peak_memory and report.peak_memory.as_dict()
    payload = told.pop("payload")
    head = json.dumps(told).encode()
    return _LENGTH.pack(len(head)) + head + payload


def from_bytes(data: bytes, rank: int) -> Report:
    """What ``to_bytes`` has made on ``rank``.

    Raises:
        ConnectionError: the bytes are something else.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        head, payload = data[_LENGTH.size :][:length], data[_LENGTH.size + length :]
        told = json.loads(head)
        told["spans"] = tuple(map(_span, told["spans"]))
        peak = told["peak_memory"]
        told["peak_memory"] = None if peak is None else PeakMemory.of(peak)
        report = Report(**told, payload=payload, is_plain=True)
        if (report.rank, report.kind) != (rank, "value"):
            raise ValueError(f"it is {report.kind!r} of rank {report.rank!r}")
        for field in fields(Report):
            kind, found = _TYPES.get(field.type), getattr(report, field.name)
            if kind is not None and not isinstance(found, kind):
                raise ValueError(f"its {field.name} is a {type(found).__name__}")
        return report
    except Exception as error:
        raise ConnectionError(
            f"the report of rank {rank} is not one that labkit writes ({type(error).__name__}: "
            f"{error}; is it the same labkit on all hosts?). {SUSPICION}"
        ) from None


def _span(found: list[Any]) -> Span:
    rank, kind, *numbers, meets = found
    if not isinstance(kind, str):
        raise ValueError("a span without a kind")
    start_s, end_s = (float(number) for number in numbers[:2])
    num_bytes, lane = int(numbers[2]), int(numbers[4])
    peer = None if numbers[3] is None else int(numbers[3])
    met = tuple((int(one), int(other), int(number)) for one, other, number in meets)
    return Span(int(rank), kind, start_s, end_s, num_bytes, peer, lane, met)
