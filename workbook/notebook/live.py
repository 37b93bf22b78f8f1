"""A cell while ranks run: their lanes, losses and rates; at the end, the timeline.

``labkit.engine.runtime.output`` asks for a ``watcher`` of each run that a notebook starts. A
run that ends within a second shows nothing.
"""

import html
import secrets
import sys
import time
from typing import Any

import numpy as np

from labkit.engine.comm.board import Board
from labkit.engine.runtime.launch import RunResult
from labkit.engine.tracing import Trace
from labkit.units import format_count, format_number
from workbook.notebook.lane_picture import draw
from workbook.notebook.lanes import History
from workbook.plots.timeline import timeline

_AFTER_S = 1.0
_READ_EVERY_S = 0.1
_DRAW_EVERY_S = 0.33
_FIRST_EXTENT_S = 4.0
_MOST_LANES = 16
_SLOTS = 48

# The message that has run the cell in which the last picture is.
_shown_in = ""


def watcher(board: Board) -> "LiveRun":
    """Return the object that draws a run in the cell that has started it."""
    return LiveRun(board, Cell())


class Cell:
    """The place in the present cell where its runs are drawn, each in place of the one before."""

    def __init__(self) -> None:
        self._shell: Any = sys.modules["IPython"].get_ipython()
        request = (self._shell.get_parent() or {}).get("header", {})
        self._message = request.get("msg_id", "")
        # A button's callback has no cell to draw in.
        self.is_cell = request.get("msg_type") == "execute_request"

    def show(self, page: str, text: str) -> None:
        global _shown_in
        data = {"text/html": page, "text/plain": text}
        name = {"display_id": f"labkit-{self._message}"}
        is_update = _shown_in == self._message
        self._shell.display_pub.publish(data, {}, transient=name, update=is_update)
        _shown_in = self._message


class LiveRun:
    """Draws the run of a status board in a ``Cell``."""

    def __init__(self, board: Board, cell: Any):
        self._board = board
        self._cell = cell
        self._history = History(board)
        self._ranks = range(min(board.world_size, _MOST_LANES))
        self._name = f"lk{secrets.token_hex(3)}-"
        self._read_s = self._drawn_s = 0.0

    def update(self) -> None:
        """Read the board ten times a second, less often in a long run, and draw three times."""
        origins = self._board.ranks["origin_s"]
        if not self._cell.is_cell or not origins.all():  # not all ranks have started
            return
        now_s = time.perf_counter() - float(origins.max())
        if now_s - self._read_s >= max(_READ_EVERY_S, now_s / 500):
            self._read_s = now_s
            self._history.read(now_s)
        if now_s > _AFTER_S and now_s - self._drawn_s >= _DRAW_EVERY_S:
            self._drawn_s = now_s
            self._draw("")

    def close(self, trace: Trace | None) -> None:
        """Replace the lanes by the timeline of the trace; they stay after a failure."""
        # A figure of more spans would take seconds.
        if self._drawn_s and trace is not None and 0 < len(trace.spans) < 20_000:
            figure = timeline(RunResult([], trace, self._drawn_s, [], []))
            self._cell.show(figure.html(), repr(figure))
        elif self._drawn_s and trace is None:
            self._draw(", stopped")
        elif self._drawn_s:
            self._draw(", ended")

    def _draw(self, state: str) -> None:
        rows = self._board.ranks
        extent_s = _FIRST_EXTENT_S
        while extent_s < self._drawn_s:
            extent_s *= 2
        lanes = self._history.lanes(self._ranks, np.linspace(0.0, extent_s, _SLOTS + 1))
        beside = [self._words(rank) for rank in self._ranks]
        head = f"{format_count(self._board.world_size, 'rank')}, {self._drawn_s:.1f} s{state}"
        progress = None
        if self._board.world_size > _MOST_LANES:
            head += f", of which {_MOST_LANES} are drawn"
        reported = rows[rows["total"] > 0]
        if len(reported):
            progress = (reported["done"] / reported["total"]).min()
            slowest = reported[int((reported["done"] / reported["total"]).argmin())]
            label = slowest["label"].decode(errors="replace")
            head += f": {slowest['done']:,} of {slowest['total']:,} {label}".rstrip()
        # A run without spans has no lanes, but it is seen to be alive.
        page = html.escape(head)
        if any(lanes):
            page = draw(lanes, extent_s, head, beside, progress, self._name)
        self._cell.show(f"<div>{page}</div>", f"[live] {head}")

    def _words(self, rank: int) -> str:
        """The loss and the rate of a rank."""
        row = self._board.ranks[rank]
        parts = []
        # A stage that is not the last has no loss, and reports 0.
        if row["loss"]:
            parts.append(f"loss {row['loss']:.4g}")
        if row["samples"]:
            rate = self._history.rates("samples")[rank]
            unit = "samples/s"
        else:
            rate = self._history.rates("done")[rank]
            unit = "steps/s"
        if rate:
            parts.append(f"{format_number(rate)} {unit}")
        return ", ".join(parts)
