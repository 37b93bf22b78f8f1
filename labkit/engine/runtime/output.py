"""The output of a run in the calling process: the ranks' lines, and a drawing in a notebook."""

import importlib
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any

from labkit.engine.comm.board import Board
from labkit.engine.runtime.preload import IN_NOTEBOOKS, interrupts_later, kernel
from labkit.engine.tracing import Trace

MAX_CHARS = 200_000
_SHOW_EVERY_S = 1.0
_draws = ContextVar("draws", default=True)


def is_live() -> bool:
    """Say whether to show output during a run; LABKIT_LIVE=0 makes a cell's output repeatable."""
    return os.environ.get("LABKIT_LIVE", "1") != "0"


class Output:
    """Prints the ranks' output by rank and line, up to a limit; of a bar, its last state."""

    def __init__(self) -> None:
        self._open: dict[Connection, int] = {}
        # By rank: the beginning of its next line, the lines that are not printed yet, how many
        # characters were kept, and how many were cut.
        self._parts: list[bytes] = []
        self._lines: list[list[str]] = []
        self._kept: list[int] = []
        self._cut: list[int] = []
        self._shown_s = time.monotonic()

    @property
    def connections(self) -> list[Connection]:
        return list(self._open)

    def follow(self, connection: Connection) -> None:
        """Take the pipe of the next rank."""
        self._open[connection] = len(self._parts)
        self._parts.append(b"")
        self._lines.append([])
        self._kept.append(0)
        self._cut.append(0)

    def read(self, ready: Collection[object]) -> None:
        """Read from the connections that are in ``ready``."""
        for connection, rank in list(self._open.items()):
            if connection not in ready:
                continue
            data = os.read(connection.fileno(), 1 << 16)
            if not data:
                del self._open[connection]
                connection.close()
            *lines, rest = (self._parts[rank] + data).split(b"\n")
            if len(rest) > MAX_CHARS:
                lines.append(rest)
                rest = b""
            self._parts[rank] = rest
            for line in lines:
                self._add(rank, line)

    def _add(self, rank: int, line: bytes) -> None:
        last_state = line.rstrip(b"\r").rpartition(b"\r")[2]
        text = last_state.decode("utf-8", errors="backslashreplace")
        if self._kept[rank] < MAX_CHARS:
            self._lines[rank].append(text)
            self._kept[rank] += len(text) + 1
        else:
            self._cut[rank] += len(text) + 1

    def show(self) -> None:
        """During a run: print the lines that are complete, once in a while."""
        if is_live() and time.monotonic() - self._shown_s > _SHOW_EVERY_S:
            self._shown_s = time.monotonic()
            for rank in range(len(self._lines)):
                self._print(rank)

    def flush(self) -> None:
        """Print all that is left, and how many characters were cut."""
        for rank, cut in enumerate(self._cut):
            self._end_line(rank)
            if cut:
                words = f"more characters cut (a rank may print {MAX_CHARS:,})"
                self._lines[rank].append(f"... {cut:,} {words}")
                self._cut[rank] = 0
            self._print(rank)

    def take_pending(self, rank: int) -> str:
        """Remove and return a rank's unprinted lines, for a message that quotes them."""
        self._end_line(rank)
        text = "\n".join(self._lines[rank])
        self._lines[rank].clear()
        return text

    def _end_line(self, rank: int) -> None:
        part = self._parts[rank]
        self._parts[rank] = b""
        if part.strip():
            self._add(rank, part)

    def _print(self, rank: int) -> None:
        # Taken first: an interrupt while they are printed must not print them twice.
        lines = self._lines[rank]
        self._lines[rank] = []
        if lines:
            print("\n".join(f"[rank {rank}] {line}" for line in lines), flush=True)

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()


@contextmanager
def undrawn() -> Iterator[None]:
    """Within the block, runs show nothing while they last: a check shows its result."""
    token = _draws.set(False)
    try:
        yield
    finally:
        _draws.reset(token)


class Watcher:
    """Shows a run in a notebook's kernel, by the module in ``IN_NOTEBOOKS``; elsewhere nothing."""

    def __init__(self, board: Board):
        self.drawn: Any = None
        if _draws.get() and is_live() and kernel() is not None:
            for name in IN_NOTEBOOKS:
                with interrupts_later():
                    self.drawn = importlib.import_module(name).watcher(board)

    def update(self) -> None:
        """Show the present state; called some twenty times a second."""
        if self.drawn is not None:
            self.drawn.update()

    def close(self, trace: Trace | None) -> None:
        """Show the end: the whole trace, or None if the run has failed."""
        if self.drawn is not None:
            self.drawn.close(trace)
