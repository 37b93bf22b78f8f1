"""One progress bar per run, of its slowest rank, drawn from the status board."""

import time
from typing import Any

from labkit.comm.board import Board
from labkit.runtime.output import is_live

# A run that is over sooner shows no bar.
_BAR_AFTER_S = 0.5
_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"


class ProgressBar:
    """The bar of one run: a widget in a notebook, text in a terminal, nothing in a file."""

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
            # Not before it is needed: in a notebook it imports ipywidgets.
            from tqdm.auto import tqdm

            now = {"initial": done, "total": total, "desc": label}
            self._bar = tqdm(**now, disable=None, bar_format=_FORMAT)
        self._bar.total = total
        self._bar.set_description(label, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self.update()
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
