"""The messages between a rank and its launcher, over the rank's pipe.

A rank sends one report; the launcher answers with one byte, after which the rank may exit. Each
side learns from the end of the pipe that the other process has ended.
"""

import os
import pickle
import struct
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from labkit.trace import Span

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 20
_GO = b"g"
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
        summary, location, traceback: of the exception, if ``kind`` is not ``value``; the fields
            above them are empty in this case.
        duration_s: how long the function took.
        returned_at_s: when it returned, on the clock that all processes of a machine share.
        travel_s: the time from then until the launcher had the report; 0 until it has arrived.
    """

    rank: int
    kind: str
    payload: bytes = b""
    spans: tuple[Span, ...] = ()
    messages: int = 0
    bytes_sent: int = 0
    summary: str = ""
    location: str = ""
    traceback: str = ""
    duration_s: float = 0.0
    returned_at_s: float = 0.0
    travel_s: float = 0.0


def send_report(control: Connection, report: Report) -> None:
    """Send the whole report, in as many writes as the pipe needs."""
    data = memoryview(pickle.dumps(report))
    for part in (_LENGTH.pack(len(data)), data):
        while part:
            part = part[os.write(control.fileno(), part) :]


def let_go(control: Connection) -> None:
    """Tell a rank that it may exit, because all ranks have returned."""
    os.write(control.fileno(), _GO)


def may_go(control: Connection) -> bool:
    """Wait until the launcher lets this rank go; False when the launcher is gone."""
    try:
        return os.read(control.fileno(), 1) == _GO
    except OSError:
        return False


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


class Inbox:
    """The launcher's end of a rank's pipe: reads what has arrived, never waits for the rest.

    A rank that is stopped in the middle of a large report must not stop its launcher too.
    """

    def __init__(self, control: Connection):
        self.control = control
        self._data = bytearray()

    def read(self) -> Report | None:
        """Read what has arrived; return the report once it is complete, None until then.

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
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if len(self._data) < _LENGTH.size + length:
            return None
        report = pickle.loads(memoryview(self._data)[_LENGTH.size :])
        self._data = bytearray()
        return replace(report, travel_s=time.monotonic() - report.returned_at_s)
