"""One progress bar for a run, drawn from the status board."""

import sys
import time

from labkit.comm.board import Board
from labkit.runtime.output import is_live

_BAR_AFTER_S = 0.5


class ProgressBar:
    """One bar for the run, drawn from the board: nothing for a run that is over at once."""

    def __init__(self, board: Board):
        self._board = board
        self._started_s = time.monotonic()
        self._shown = ""
        self._handle = None
        self._in_notebook = _in_notebook()

    def update(self) -> None:
        if not is_live() or time.monotonic() - self._started_s < _BAR_AFTER_S:
            return
        rows = self._board.ranks[self._board.ranks["total"] > 0]
        if not len(rows):
            return
        slowest = rows[int((rows["done"] / rows["total"]).argmin())]
        self._draw(int(slowest["done"]), int(slowest["total"]), slowest["label"].decode())

    def _draw(self, done: int, total: int, label: str) -> None:
        filled = round(24 * done / total)
        elapsed_s = time.monotonic() - self._started_s
        text = f"{'█' * filled}{'░' * (24 - filled)} {done}/{total} {label}"
        if text == self._shown:
            return
        self._shown = text
        text = f"{text} [{elapsed_s:.1f} s]"
        if self._in_notebook:
            self._display(text)
        elif sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def _display(self, text: str) -> None:
        from IPython.display import display

        bundle = {"text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def close(self) -> None:
        self.update()
        if self._shown and not self._in_notebook and sys.stderr.isatty():
            print(file=sys.stderr)


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
