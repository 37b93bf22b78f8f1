"""The ranks' output, as the calling process prints it: by rank, by line, up to a limit."""

import os
import re
import time
from collections import deque
from collections.abc import Collection
from multiprocessing.connection import Connection

MAX_CHARS = 200_000
# Lines are shown in rank order, so that the same run prints the same text in Jupyter, in a
# terminal and under test. A rank's lines wait for the ranks below it, at most this long.
_HOLD_S = 2.0
# How tqdm moves between the lines of several bars.
_CURSOR = re.compile(rb"\x1b\[(A|[02]?K)")


def is_live() -> bool:
    """Whether to show output during a run; LABKIT_LIVE=0 makes a cell's output repeatable."""
    return os.environ.get("LABKIT_LIVE", "1") != "0"


class Output:
    """Collects the ranks' output, and prints it by line with the rank's name.

    Of a line that is written again and again after a carriage return, as a bar is, the last state
    counts.

    Args:
        connections: by rank, the ends of the pipes to read from.
    """

    def __init__(self, connections: list[Connection]):
        self._open = {connection: rank for rank, connection in enumerate(connections)}
        # By rank: the beginning of its next line, the lines that are not printed yet, how many
        # characters there have been, and how many were cut.
        self._parts = [b"" for _ in connections]
        self._lines: list[deque[str]] = [deque() for _ in connections]
        self._num_chars, self._num_cut = [0] * len(connections), [0] * len(connections)
        self._waiting_since_s: float | None = None

    @property
    def connections(self) -> list[Connection]:
        return list(self._open)

    @property
    def bars(self) -> dict[int, list[str]]:
        """By rank, the line that it is writing, if it is a bar."""
        texts = {rank: _last_state(part) for rank, part in enumerate(self._parts) if b"\r" in part}
        return {rank: [text] for rank, text in texts.items() if text.strip()}

    def read(self, ready: Collection[object]) -> None:
        """Read from the connections that are in ``ready``."""
        for connection, rank in list(self._open.items()):
            if connection not in ready:
                continue
            try:
                data = os.read(connection.fileno(), 1 << 16)
            except OSError:
                data = b""
            if not data:
                del self._open[connection]
                connection.close()
            *lines, rest = (self._parts[rank] + data).split(b"\n")
            # What a bar has overwritten is not kept; a line without an end is cut in parts.
            if b"\r" in rest:
                rest = b"\r" + rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
            elif len(rest) > MAX_CHARS:
                lines, rest = [*lines, rest], b""
            self._parts[rank] = rest
            for line in lines:
                self._add(rank, line)

    def _add(self, rank: int, line: bytes) -> None:
        text = _last_state(line)
        if line.strip(b"\r") and not text.strip() and (b"\r" in line or b"\x1b" in line):
            return  # a bar that was erased
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        room = max(0, MAX_CHARS - self._num_chars[rank])
        self._num_chars[rank] += len(text) + 1
        self._num_cut[rank] += len(text[room:]) if room else len(text) + 1
        if room:
            self._lines[rank].append(text[:room])

    def show(self, finished: set[int]) -> None:
        """Print rank 0's lines at once, and another rank's when all below it have finished.

        Lines that have waited too long are printed without waiting for ``finished`` ranks.
        """
        if not is_live() or self._waiting_since_s is None:
            return
        overdue = time.monotonic() - self._waiting_since_s > _HOLD_S
        for rank in range(len(self._lines)):
            self._print(rank)
            if rank not in finished and not overdue:
                break
        if not any(self._lines):
            self._waiting_since_s = None

    def flush(self) -> None:
        """Print all that is left, and how many characters were cut."""
        for rank in range(len(self._lines)):
            self._end_line(rank)
            if cut := self._num_cut[rank]:
                self._num_cut[rank] = 0
                words = f"more characters cut (a rank may print {MAX_CHARS:,})"
                self._lines[rank].append(f"... {cut:,} {words}")
            self._print(rank)

    def take_pending(self, rank: int) -> str:
        """Remove and return a rank's unprinted lines, for a message that quotes them."""
        self._end_line(rank)
        text = "\n".join(self._lines[rank])
        self._lines[rank].clear()
        return text

    def _end_line(self, rank: int) -> None:
        part, self._parts[rank] = self._parts[rank], b""
        if _last_state(part).strip():
            self._add(rank, part)

    def _print(self, rank: int) -> None:
        if self._lines[rank]:
            print("\n".join(f"[rank {rank}] {line}" for line in self._lines[rank]), flush=True)
            self._lines[rank].clear()

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()


def _last_state(line: bytes) -> str:
    """A line as it looks once what its carriage returns have overwritten is gone."""
    states = [state for state in _CURSOR.sub(b"", line).split(b"\r") if state]
    return states[-1].decode("utf-8", errors="backslashreplace") if states else ""
