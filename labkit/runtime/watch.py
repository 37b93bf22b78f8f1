"""What shows a run while it lasts: one bar in a terminal; in a notebook, a drawing."""

import importlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from labkit.comm.board import Board
from labkit.runtime.objects import kernel
from labkit.runtime.output import is_live, is_terminal
from labkit.runtime.preload import IN_NOTEBOOKS, interrupts_later
from labkit.trace import Trace

# A run that ends sooner shows no bar.
_BAR_AFTER_S = 0.5
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
_EVERY_S = 0.25

Bars = Mapping[int, Sequence[str]]


class Watcher(Protocol):
    """Shows one run."""

    def update(self, bars: Bars) -> None:
        """Show the present state; called some twenty times a second.

        Args:
            bars: by rank, the bars that it draws with carriage returns.
        """
        ...

    def close(self, trace: Trace | None) -> None:
        """Show the end: the whole trace, or None if the run has failed."""
        ...


class Guarded:
    """A watcher whose failure does not end the run: it is told, and nothing more is shown."""

    def __init__(self, watcher: Watcher):
        self._watcher: Watcher | None = watcher

    def update(self, bars: Bars) -> None:
        self._call("update", bars)

    def close(self, trace: Trace | None) -> None:
        self._call("close", trace)

    def _call(self, name: str, argument: Any) -> None:
        try:
            if self._watcher is not None:
                getattr(self._watcher, name)(argument)
        except Exception as error:
            self._watcher = None
            what = f"{type(error).__name__}: {error}"
            print(f"the run goes on, and is no longer drawn: {what}", file=sys.stderr)


_draws = ContextVar("draws", default=True)


@contextmanager
def undrawn() -> Iterator[None]:
    """Within the block, runs show nothing while they last: a check shows its result."""
    token = _draws.set(False)
    try:
        yield
    finally:
        _draws.reset(token)


def watcher(board: Board) -> Watcher:
    """The watcher of a run: in a notebook the one of IN_NOTEBOOKS, if any; else the bar."""
    if not _draws.get():
        return Nothing()
    if kernel() is not None:
        if not draws_live():
            return Nothing()
        for name in IN_NOTEBOOKS:
            with interrupts_later():
                module = importlib.import_module(name)
            return Guarded(module.watcher(board))
    return Guarded(ProgressBar(board))


def draws_live() -> bool:
    """Whether a notebook draws runs while they last: not where its outputs are compared."""
    if "LABKIT_LIVE" in os.environ:
        return is_live()
    return not {"CI", "PYTEST_VERSION", "PYTEST_CURRENT_TEST"} & os.environ.keys()


class Nothing:
    """A watcher that shows nothing."""

    def update(self, bars: Bars) -> None:
        pass

    def close(self, trace: Trace | None) -> None:
        pass


class ProgressBar:
    """One bar for a run: the progress of its slowest rank, read from the status board.

    Ranks that report no progress but draw bars themselves share the terminal's line. In a file,
    both are left out.
    """

    def __init__(self, board: Board):
        self._board = board
        self._started_s = time.monotonic()
        self._bar: Any = None
        self._line = ""
        self._line_s = 0.0

    def update(self, bars: Bars) -> None:
        """Show how far the slowest rank is, if any rank reports progress."""
        if not is_live() or time.monotonic() - self._started_s < _BAR_AFTER_S:
            return
        rows = self._board.ranks[self._board.ranks["total"] > 0]
        if not len(rows):
            self._show_line(bars)
            return
        slowest = rows[int((rows["done"] / rows["total"]).argmin())]
        done, total = int(slowest["done"]), int(slowest["total"])
        label = slowest["label"].decode()
        if self._bar is None:
            # Imported only when needed.
            from tqdm import tqdm

            now = {"initial": done, "total": total, "desc": label}
            self._bar = tqdm(**now, disable=None, bar_format=_BAR_FORMAT)
        self._bar.total = total
        self._bar.set_description(label, refresh=False)
        self._bar.update(done - self._bar.n)

    def _show_line(self, bars: Bars) -> None:
        if time.monotonic() - self._line_s < _EVERY_S or not is_terminal(sys.stderr):
            return
        self._line_s = time.monotonic()
        texts = [f"[rank {rank}] {mine[-1]}" for rank, mine in bars.items()]
        width = shutil.get_terminal_size().columns - 1
        line = "  ".join(text[: max(20, width // len(texts) - 2)] for text in texts)[:width]
        if line != self._line:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            self._line = line

    def close(self, trace: Trace | None) -> None:
        self.update({})
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
        if self._line:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
