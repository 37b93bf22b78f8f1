"""What a rank tells its launcher about how it ended, over the rank's pipe.

The launcher answers with one byte, after which the rank may exit. Each side learns from the end
of the pipe that the other process has ended.
"""

import os
import pickle
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from labkit.comm.peak_memory import PeakMemory
from labkit.tracing import Span, Trace
from labkit.tracing.waits import waits_told

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 20
# The limit for each text in a report: people read it below a notebook cell.
_MOST_CHARS = 20_000


@dataclass(frozen=True)
class Report:
    """What a rank tells the launcher about how it ended.

    Attributes:
        rank: which rank.
        kind: ``value``, ``raised``, ``exited`` (SystemExit), ``mismatch``, ``peer_lost`` or
            ``unpicklable``.
        payload: the pickled value that the function returned.
        spans: the rank's part of the trace.
        messages, bytes_sent: what the rank has sent.
        device: where the rank's tensors were, such as ``cuda:0``.
        peak_memory: what it took at most.
        summary, location, traceback: of the exception, if ``kind`` is not ``value``; the fields
            above them are empty in this case.
        duration_s: how long the function took.
        is_plain: whether the payload is no pickle but plain data, see ``runtime.plain``.
    """

    rank: int
    kind: str
    payload: bytes = b""
    spans: tuple[Span, ...] = ()
    messages: int = 0
    bytes_sent: int = 0
    device: str = ""
    peak_memory: PeakMemory | None = None
    summary: str = ""
    location: str = ""
    traceback: str = ""
    duration_s: float = 0.0
    is_plain: bool = False


def trace_of(reports: Iterable[Report]) -> Trace:
    """The trace of the ranks that have returned."""
    reports = list(reports)
    devices = {report.rank: report.device for report in reports}
    return Trace.merge([waits_told(report.spans for report in reports)], devices)


def send(control: Connection, report: Report) -> None:
    """Send the whole report, in as many writes as the pipe needs."""
    data = memoryview(pickle.dumps(report))
    for part in (_LENGTH.pack(len(data)), data):
        while part:
            part = part[os.write(control.fileno(), part) :]


class Inbox:
    """The launcher's end of a rank's pipe: reads what has arrived, never waits for the rest.

    (``Connection.recv`` would wait for ever for a rank that is stopped in mid-report.)
    """

    def __init__(self, control: Connection):
        self.control = control
        self._data = bytearray()

    def read(self) -> Report | None:
        """Read what has arrived; the report, once it is complete.

        Raises:
            EOFError: the rank has ended, or closed its end.
        """
        try:
            data = os.read(self.control.fileno(), _READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        self._data += data
        if len(self._data) < _LENGTH.size + (self.expected_bytes or 1):
            return None
        with memoryview(self._data) as whole:
            return pickle.loads(whole[_LENGTH.size :])

    @property
    def expected_bytes(self) -> int:
        """The size of the report that is arriving; 0 while that is not known."""
        known = len(self._data) >= _LENGTH.size
        return _LENGTH.unpack_from(self._data)[0] if known else 0


def described(error: BaseException) -> str:
    """The text of an error, shortened; a note instead if the error's ``__str__`` raises."""
    try:
        return shortened(str(error))
    except Exception as failure:
        return f"(its str() raised {type(failure).__name__})"


def shortened(text: str) -> str:
    """The beginning and the end of a long text, and how much was cut between them."""
    if len(text) <= _MOST_CHARS:
        return text
    half = _MOST_CHARS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters cut ...\n{text[-half:]}"
