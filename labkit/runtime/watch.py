"""What shows a run while it lasts: one bar in a terminal; in a notebook, what the course draws."""

import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from labkit.comm.board import Board
from labkit.runtime.output import is_live
from labkit.runtime.preload import IN_NOTEBOOKS, interrupts_later
from labkit.trace import Trace

# A run that ends sooner shows no bar.
_BAR_AFTER_S = 0.5
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"

Bars = Mapping[int, Sequence[str]]
_draws = ContextVar("draws", default=True)


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


@contextmanager
def undrawn() -> Iterator[None]:
    """Within the block, runs show nothing while they last: a check shows its result."""
    token = _draws.set(False)
    try:
        yield
    finally:
        _draws.reset(token)


def kernel() -> Any:
    """The IPython shell of a notebook's kernel, or None."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell if hasattr(shell, "kernel") else None


def draws_live() -> bool:
    """Whether a notebook draws runs while they last: not where its outputs are compared."""
    if "LABKIT_LIVE" in os.environ:
        return is_live()
    return not {"CI", "PYTEST_VERSION", "PYTEST_CURRENT_TEST"} & os.environ.keys()


class Shown:
    """What shows a run: the course's watcher in a notebook's kernel, else the bar, or nothing.

    A watcher whose failure is told does not end the run.
    """

    def __init__(self, board: Board):
        self._watcher: Watcher | None = None
        if not _draws.get():
            return
        if kernel() is None:
            self._watcher = ProgressBar(board)
        elif draws_live():
            for name in IN_NOTEBOOKS:
                with interrupts_later():
                    module = importlib.import_module(name)
                self._watcher = module.watcher(board)

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


class ProgressBar:
    """One bar for a run: the progress of its slowest rank, read from the status board."""

    def __init__(self, board: Board):
        self._board = board
        self._started_s = time.monotonic()
        self._bar: Any = None

    def update(self, bars: Bars) -> None:
        """Show how far the slowest rank is, if any rank reports progress."""
        rows = self._board.ranks[self._board.ranks["total"] > 0]
        if not len(rows) or not is_live() or time.monotonic() - self._started_s < _BAR_AFTER_S:
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

    def close(self, trace: Trace | None) -> None:
        self.update({})
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
