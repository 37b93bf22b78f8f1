"""A cell while ranks run: their lanes, losses and rates, and a bar; at the end, the timeline.

``labkit.runtime.output`` asks for a ``watcher`` of each run that a notebook starts. A run that
ends within a second shows nothing.
"""

import base64
import html
import secrets
import sys
import time
from typing import Any

import numpy as np

from labkit.comm.board import Board
from labkit.tracing import Trace
from labkit.units import format_count, format_number, format_seconds
from workbook.notebook.lane_picture import (
    MOST_LANES,
    ON_WHITE,
    THEMED,
    WIDTH,
    Picture,
    draw,
    num_slots,
)
from workbook.notebook.lanes import History, Lane, trace_lanes
from workbook.plots.timeline import timeline_words

_AFTER_S = 1.0
_READ_EVERY_S, _DRAW_EVERY_S = 0.1, 0.33
_FIRST_EXTENT_S = 4.0

# The place of the present cell's last run. A cell with many runs shows only the last timeline.
_place: tuple[str, str] | None = None


def watcher(board: Board) -> "LiveRun":
    """What draws a run in the cell that has started it."""
    return LiveRun(board, Cell())


class Cell:
    """The place in a cell where the lanes of its runs are drawn, one run after another."""

    def __init__(self) -> None:
        global _place
        self._shell: Any = sys.modules["IPython"].get_ipython()
        request = (self._shell.get_parent() or {}).get("header", {})
        self._message = request.get("msg_id", "")
        # A button's callback has no cell to draw in.
        self.is_cell = request.get("msg_type") == "execute_request"
        self._is_shown = _place is not None and _place[0] == self._message
        self._id = _place[1] if _place and self._is_shown else f"labkit-{secrets.token_hex(8)}"
        # Another run that starts in a thread at the same time gets another place.
        _place = None

    def show(self, page: str, text: str) -> None:
        data = {"text/html": page, "text/plain": text}
        where = {"transient": {"display_id": self._id}, "update": self._is_shown}
        self._shell.display_pub.publish(data, {}, **where)
        self._is_shown = True

    def leave(self) -> None:
        """Let the cell's next run draw here."""
        global _place
        _place = (self._message, self._id) if self._is_shown else None


class LiveRun:
    """Draws one run.

    Args:
        board: its status board.
        cell: where to draw.
    """

    def __init__(self, board: Board, cell: Any):
        self._board, self._cell = board, cell
        self._history = History(board)
        self._size = format_count(board.world_size, "rank")
        self._ranks = range(min(board.world_size, MOST_LANES))
        self._name = f"lk{secrets.token_hex(3)}-"
        self._read_s = self._drawn_s = 0.0
        self._is_drawn = False

    def update(self) -> None:
        """Read the board ten times a second, and draw three times a second."""
        now_s = self._now_s()
        if not self._cell.is_cell or now_s is None:
            return
        if now_s - self._read_s >= _READ_EVERY_S:
            self._read_s = now_s
            self._history.read(now_s)
        if now_s > _AFTER_S and now_s - self._drawn_s >= _DRAW_EVERY_S:
            self._drawn_s = now_s
            self._draw(now_s)

    def _now_s(self) -> float | None:
        """Seconds of the trace; None before all ranks have started."""
        origins = self._board.ranks["origin_s"]
        return time.perf_counter() - float(origins.max()) if origins.all() else None

    def _draw(self, now_s: float) -> None:
        extent_s = _FIRST_EXTENT_S
        while extent_s < now_s:
            extent_s *= 2
        lanes = self._live_lanes(extent_s)
        progress, head = self._progress(now_s)
        picture = Picture(lanes, extent_s, head, self._words(), progress)
        # Its name stays the same, so that a screen reader does not read it again and again.
        label = f"Live timeline of {self._size}, still running"
        page = draw(picture, self._name, THEMED, f'role="img" aria-label="{label}"')
        self._cell.show(f"<div>{page}</div>", f"[live] {head}")
        self._is_drawn = True

    def _live_lanes(self, extent_s: float) -> list[Lane]:
        sums = self._board.ranks["kind_s"][: len(self._ranks)]
        slots = num_slots(int(np.count_nonzero(sums)))
        return self._history.lanes(self._ranks, np.linspace(0.0, extent_s, slots + 1))

    def _progress(self, now_s: float) -> tuple[float | None, str]:
        """The bar's part, 0 to 1, and the line above it, of the slowest rank."""
        head = f"{self._size}, {now_s:.1f} s"
        if self._board.world_size > MOST_LANES:
            head += f", of which {MOST_LANES} are drawn"
        rows = self._board.ranks[self._board.ranks["total"] > 0]
        if not len(rows):
            return None, head
        slowest = rows[int((rows["done"] / rows["total"]).argmin())]
        done, total = int(slowest["done"]), int(slowest["total"])
        label = slowest["label"].decode(errors="replace")
        return done / total, f"{head}: {done:,} of {total:,} {label}".rstrip()

    def _words(self, run_s: float | None = None) -> list[str]:
        """Loss and rate of each lane: the present rate, or that of a whole run of ``run_s``."""
        words = []
        for rank in self._ranks:
            row, parts = self._board.ranks[rank], []
            # A stage that is not the last has no loss, and reports 0.
            if row["loss"]:
                parts.append(f"loss {float(row['loss']):.4g}")
            column, unit = ("samples", "samples/s") if row["samples"] else ("done", "steps/s")
            if row[column]:
                rate = row[column] / run_s if run_s else self._history.rates(column)[rank]
                parts.append(f"{format_number(rate)} {unit}")
            words.append(", ".join(parts))
        return words

    def close(self, trace: Trace | None) -> None:
        """Replace the live lanes by those of the trace, or leave them as they were."""
        if self._is_drawn and trace is not None and trace.spans:
            self._show_timeline(trace)
        elif self._is_drawn:
            self._show_last(has_failed=trace is None)
        self._cell.leave()

    def _show_timeline(self, trace: Trace) -> None:
        end_s = max(span.end_s for span in trace.spans)
        slots = num_slots(len({(s.rank, s.kind, s.lane > 0) for s in trace.spans}))
        lanes = trace_lanes(trace, self._ranks, np.linspace(0.0, end_s, slots + 1))
        head = f"What each rank did: {self._size}, {format_seconds(end_s)}"
        self._show_still(Picture(lanes, end_s, head, self._words(end_s)), *timeline_words(trace))

    def _show_last(self, has_failed: bool) -> None:
        now_s = self._now_s() or self._drawn_s
        self._history.read(now_s)
        how = "stopped" if has_failed else "ended"
        head = f"{self._size}, {how} after {now_s:.1f} s"
        picture = Picture(self._live_lanes(now_s), now_s, head, self._words(now_s))
        why = "The run has failed, or was stopped" if has_failed else "No span was recorded"
        caption = f"{why}: this is what its ranks have reported."
        self._show_still(picture, f"Timeline of {head}.", caption)

    def _show_still(self, picture: Picture, alt: str, caption: str) -> None:
        svg = draw(picture, self._name, ON_WHITE, f'width="{WIDTH}"')
        source = base64.b64encode(svg.encode()).decode()
        page = (
            f'<figure style="margin: 0"><img alt="{html.escape(alt)}" '
            f'src="data:image/svg+xml;base64,{source}" width="{WIDTH}" '
            'style="max-width: 100%; height: auto">'
            f'<figcaption style="max-width: {WIDTH}px">{html.escape(caption)}</figcaption>'
            "</figure>"
        )
        self._cell.show(page, f"[figure] {alt}")
