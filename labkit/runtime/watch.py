"""What shows a run in a notebook while it lasts: the drawing of a package above labkit."""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from labkit.comm.board import Board
from labkit.runtime.output import is_live
from labkit.runtime.preload import IN_NOTEBOOKS, interrupts_later
from labkit.tracing import Trace

Bars = Mapping[int, Sequence[str]]
_draws = ContextVar("draws", default=True)


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


class Watcher:
    """Shows a run in a notebook's kernel, by the module in ``IN_NOTEBOOKS``; elsewhere nothing.

    Where the drawing fails this is said once, and the run goes on.
    """

    def __init__(self, board: Board):
        self.drawn: Any = None
        if _draws.get() and kernel() is not None and draws_live():
            for name in IN_NOTEBOOKS:
                with interrupts_later():
                    self.drawn = importlib.import_module(name).watcher(board)

    def update(self, bars: Bars) -> None:
        """Show the present state; called some twenty times a second.

        Args:
            bars: by rank, the bars that it draws with carriage returns.
        """
        self._call("update", bars)

    def close(self, trace: Trace | None) -> None:
        """Show the end: the whole trace, or None if the run has failed."""
        self._call("close", trace)

    def _call(self, name: str, argument: Any) -> None:
        try:
            if self.drawn is not None:
                getattr(self.drawn, name)(argument)
        except Exception as error:
            self.drawn = None
            what = f"{type(error).__name__}: {error}"
            print(f"the run goes on, and is no longer drawn: {what}", file=sys.stderr)
