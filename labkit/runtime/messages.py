"""The messages between a rank and its launcher, over the rank's pipe.

A rank sends the objects that it displays, and one report at the end; the launcher answers with one
byte, after which the rank may exit. Each side learns from the end of the pipe that the other
process has ended.
"""

import os
import pickle
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from labkit.comm.peak_memory import PeakMemory
from labkit.runtime.waits import waits_told
from labkit.trace import Span, Trace

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 20
_GO = b"g"
# A rank may display an object in one thread while its function returns in another.
_SENDING = threading.Lock()
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
        returned_at_s: when it returned, on the clock that all processes of a machine share.
        travel_s: the time from then until the launcher had the report; 0 until it has arrived.
        is_plain: whether the payload is no pickle but plain data, see ``between_hosts.reports``.
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
    returned_at_s: float = 0.0
    travel_s: float = 0.0
    is_plain: bool = False


@dataclass(frozen=True)
class Shown:
    """An object that a rank displays.

    Attributes:
        rank: which rank.
        number: of the object, counted on its rank; its place in the rank's output has a marker.
        data, metadata: by MIME type, text or bytes or what JSON can hold.
        display_id: by which later messages change it; empty if none will.
        is_update: this message changes the object that has the ``display_id``.
    """

    rank: int
    number: int
    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str = ""
    is_update: bool = False


def trace_of(reports: Iterable[Report]) -> Trace:
    """The trace of the ranks that have returned."""
    reports = list(reports)
    devices = {report.rank: report.device for report in reports}
    return Trace.merge([waits_told(report.spans for report in reports)], devices)


def send(control: Connection, message: Report | Shown) -> None:
    """Send the whole message, in as many writes as the pipe needs."""
    data = memoryview(pickle.dumps(message))
    with _SENDING:
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

    Args:
        control: the pipe.
        same_clock: whether the rank is on this machine, where all processes read one clock.
    """

    def __init__(self, control: Connection, same_clock: bool = True):
        self.control = control
        self._same_clock = same_clock
        self._data = bytearray()
        self._since_s = 0.0

    @property
    def expected_bytes(self) -> int:
        """The size of the message that is arriving; 0 while that is not known."""
        known = len(self._data) >= _LENGTH.size
        return _LENGTH.unpack_from(self._data)[0] if known else 0

    def read(self) -> list[Report | Shown]:
        """Read what has arrived; return the messages that are complete.

        Raises:
            EOFError: the rank has ended, or closed its end.
            MemoryError: this process has no memory for the message.
        """
        try:
            data = os.read(self.control.fileno(), _READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        if not self._data:
            self._since_s = time.monotonic()
        self._data += data
        found = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + self.expected_bytes
            if len(self._data) < end:
                break
            with memoryview(self._data) as whole, whole[_LENGTH.size : end] as part:
                message = pickle.loads(part)
            del self._data[:end]
            if isinstance(message, Report):
                since_s = message.returned_at_s if self._same_clock else self._since_s
                message = replace(message, travel_s=time.monotonic() - since_s)
            found.append(message)
        return found
