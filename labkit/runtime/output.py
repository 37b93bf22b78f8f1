"""The ranks' output, as the calling process prints it."""

import os
import sys
import time
from collections import deque
from collections.abc import Collection
from multiprocessing.connection import Connection
from typing import TextIO

from labkit.runtime.messages import Shown
from labkit.runtime.objects import Objects
from labkit.runtime.screen import Screen

MAX_CHARS = 200_000
# Lines are shown in rank order, so that the same run prints the same text in Jupyter, in a
# terminal and under test. A rank's lines wait for the ranks below it, at most this long.
_HOLD_S = 2.0
# A line that a bar has left for this long will not be overwritten.
_REST_S = 0.2


def is_live() -> bool:
    """Whether to show output during a run; LABKIT_LIVE=0 makes a cell's output repeatable."""
    return os.environ.get("LABKIT_LIVE", "1") != "0"


class Output:
    """Collects the ranks' output and prints it by line, with the rank's name, up to a limit.

    Objects that a rank displays are shown at their places among its lines.
    """

    def __init__(self, connections: list[Connection]):
        self._open = {connection: rank for rank, connection in enumerate(connections)}
        self._screens = [Screen() for _ in connections]
        # Lines, and numbers of objects to show.
        self._due: list[deque[str | int]] = [deque() for _ in connections]
        self._objects = Objects()
        self._kept = [0] * len(connections)
        self._cut = [0] * len(connections)
        self._rested_s = 0.0
        self._held_since_s: float | None = None

    @property
    def connections(self) -> list[Connection]:
        return list(self._open)

    @property
    def bars(self) -> dict[int, list[str]]:
        """By rank, the bars that it draws with carriage returns, as they are now."""
        return {rank: bars for rank, screen in enumerate(self._screens) if (bars := screen.bars)}

    def read(self, ready: Collection[object]) -> None:
        """Read from the connections that are in ``ready``."""
        for connection in self.connections:
            if connection in ready:
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        rank = self._open[connection]
        try:
            data = os.read(connection.fileno(), 1 << 16)
        except OSError:
            data = b""
        if data:
            self._add(rank, self._screens[rank].feed(data))
            return
        del self._open[connection]
        connection.close()
        self._add(rank, self._screens[rank].end())

    def take(self, shown: Shown) -> None:
        """Take an object that a rank displays."""
        self._objects.add(shown)

    def _add(self, rank: int, settled: list[bytes | int]) -> None:
        for item in settled:
            if isinstance(item, int):
                self._due[rank].append(item)
            else:
                self._add_line(rank, item.decode("utf-8", errors="backslashreplace"))
        if settled and self._held_since_s is None:
            self._held_since_s = time.monotonic()

    def _add_line(self, rank: int, text: str) -> None:
        if self._kept[rank] >= MAX_CHARS:
            self._cut[rank] += len(text) + 1
            return
        room = MAX_CHARS - self._kept[rank]
        self._kept[rank] += len(text) + 1
        self._cut[rank] += max(0, len(text) - room)
        self._due[rank].append(text[:room])

    def show(self, finished: set[int]) -> None:
        """Print rank 0's lines at once, and another rank's when all below it have finished.

        Lines that have waited too long are printed without waiting for ``finished`` ranks.
        """
        if not is_live():
            return
        now_s = time.monotonic()
        if now_s - self._rested_s > _REST_S:
            self._rested_s = now_s
            for rank, screen in enumerate(self._screens):
                self._add(rank, screen.rest())
        if self._held_since_s is None:
            return
        overdue = now_s - self._held_since_s > _HOLD_S
        for rank in range(len(self._due)):
            self._print(rank)
            if rank not in finished and not overdue:
                break
        if not any(self._due):
            self._held_since_s = None

    def flush(self) -> None:
        """Print all that is left, and how many characters were cut."""
        for rank, screen in enumerate(self._screens):
            self._add(rank, screen.end())
            self._due[rank] = deque(self._objects.placed(rank, self._due[rank]))
            if self._cut[rank]:
                self._due[rank].append(
                    f"... {self._cut[rank]:,} more characters cut (a rank may print {MAX_CHARS:,})"
                )
                self._cut[rank] = 0
            self._print(rank)

    def _print(self, rank: int) -> None:
        """Print the lines of a rank, and show its objects, in the order in which they came."""
        lines: list[str] = []
        while self._due[rank]:
            item = self._due[rank][0]
            if isinstance(item, str):
                lines.append(item)
            elif not self._objects.has(rank, item):
                break  # it is on its way, through the other pipe
            else:
                if (text := self._objects.text(rank, item)) is not None:
                    lines += text.splitlines()
                else:
                    _print_lines(rank, [*lines, "displays:"])
                    lines.clear()
                self._objects.show(rank, item)
            self._due[rank].popleft()
        _print_lines(rank, lines)

    def take_pending(self, rank: int) -> str:
        """Remove and return a rank's unprinted lines, for a message that quotes them."""
        self._add(rank, self._screens[rank].close())
        lines = [item for item in self._due[rank] if isinstance(item, str)]
        left: list[str | int] = [item for item in self._due[rank] if isinstance(item, int)]
        self._due[rank] = deque(left)
        return "\n".join(lines)

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; a program may replace or close its streams."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


def _print_lines(rank: int, lines: list[str]) -> None:
    if lines:
        # Over a bar in a terminal.
        erase = "\r\x1b[K" if is_terminal(sys.stdout) else ""
        print(erase + "\n".join(f"[rank {rank}] {line}" for line in lines), flush=True)
