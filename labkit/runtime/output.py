"""What the calling process shows during a run: the ranks' output and their progress."""

import os
import time
from collections.abc import Collection
from multiprocessing.connection import Connection
from typing import Any

from labkit.comm.board import Board

MAX_CHARS = 200_000
# Lines are shown in rank order, so that the same run prints the same text in Jupyter, in a
# terminal and under test. A rank's lines wait for the ranks below it, at most this long.
_HOLD_S = 2.0

# A run that ends sooner shows no bar.
_BAR_AFTER_S = 0.5
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"


def is_live() -> bool:
    """Whether to show output during a run; LABKIT_LIVE=0 makes a cell's output repeatable."""
    return os.environ.get("LABKIT_LIVE", "1") != "0"


class Output:
    """Collects the ranks' output and prints it by line, with the rank's name, up to a limit."""

    def __init__(self, connections: list[Connection]):
        self._open = {connection: rank for rank, connection in enumerate(connections)}
        self._pending = [b""] * len(connections)
        self._lines: list[list[str]] = [[] for _ in connections]
        self._kept = [0] * len(connections)
        self._cut = [0] * len(connections)
        self._held_since_s: float | None = None

    @property
    def connections(self) -> list[Connection]:
        return list(self._open)

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
        if not data:
            del self._open[connection]
            connection.close()
            self._add(rank, self._pending[rank])
            self._pending[rank] = b""
            return
        *whole, self._pending[rank] = (self._pending[rank] + data).split(b"\n")
        for line in whole:
            self._add(rank, line, ended=True)
        if len(self._pending[rank]) > MAX_CHARS:
            self._add(rank, self._pending[rank])
            self._pending[rank] = b""

    def _add(self, rank: int, line: bytes, ended: bool = False) -> None:
        text = line.decode("utf-8", errors="backslashreplace").rstrip("\r")
        if not text and not ended:
            return
        if self._kept[rank] >= MAX_CHARS:
            self._cut[rank] += len(text) + 1
            return
        room = MAX_CHARS - self._kept[rank]
        self._kept[rank] += len(text) + 1
        self._cut[rank] += max(0, len(text) - room)
        self._lines[rank].append(f"[rank {rank}] {text[:room]}")
        if self._held_since_s is None:
            self._held_since_s = time.monotonic()

    def show(self, finished: set[int]) -> None:
        """Print rank 0's lines at once, and another rank's when all below it have finished.

        Lines that have waited too long are printed without waiting for ``finished`` ranks.
        """
        if self._held_since_s is None or not is_live():
            return
        overdue = time.monotonic() - self._held_since_s > _HOLD_S
        due = []
        for rank, lines in enumerate(self._lines):
            due += lines
            lines.clear()
            if rank not in finished and not overdue:
                break
        if not any(self._lines):
            self._held_since_s = None
        self._print(due)

    def flush(self) -> None:
        """Print all lines that are left, and how many characters were cut."""
        due = []
        for rank, lines in enumerate(self._lines):
            due += lines
            lines.clear()
            if self._cut[rank]:
                due.append(
                    f"[rank {rank}] ... {self._cut[rank]:,} more characters cut "
                    f"(a rank may print {MAX_CHARS:,})"
                )
                self._cut[rank] = 0
        self._print(due)

    def _print(self, lines: list[str]) -> None:
        if lines:
            print("\n".join(lines), flush=True)

    def take_pending(self, rank: int) -> str:
        """Remove and return a rank's unprinted lines, for a message that quotes them."""
        lines = [line.removeprefix(f"[rank {rank}] ") for line in self._lines[rank]]
        self._lines[rank].clear()
        return "\n".join(lines)

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()


class ProgressBar:
    """One bar for a run: the progress of its slowest rank, read from the status board.

    The bar is a widget in a notebook and text in a terminal; in a file it is left out.
    """

    def __init__(self, board: Board):
        self._board = board
        self._started_s = time.monotonic()
        self._bar: Any = None

    def update(self) -> None:
        """Show how far the slowest rank is, if any rank reports progress."""
        if not is_live() or time.monotonic() - self._started_s < _BAR_AFTER_S:
            return
        rows = self._board.ranks[self._board.ranks["total"] > 0]
        if not len(rows):
            return
        slowest = rows[int((rows["done"] / rows["total"]).argmin())]
        done, total = int(slowest["done"]), int(slowest["total"])
        label = slowest["label"].decode()
        if self._bar is None:
            # Imported only when needed: in a notebook, tqdm imports ipywidgets.
            from tqdm.auto import tqdm

            now = {"initial": done, "total": total, "desc": label}
            self._bar = tqdm(**now, disable=None, bar_format=_BAR_FORMAT)
        self._bar.total = total
        self._bar.set_description(label, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self.update()
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
