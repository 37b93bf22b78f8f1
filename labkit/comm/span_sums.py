"""Seconds by kind of a rank's spans, added up on the status board while the rank runs.

The trace reaches the launcher only at the end of a run. What is shown before comes from these
sums: the launcher reads them some times a second, and the difference of two readings is what the
rank did in between.
"""

import threading
from collections import deque
from typing import Any

import numpy as np

from labkit.comm.board import KINDS
from labkit.trace import Recorder


class SpanSums:
    """Listens to one rank's recorder, and adds up its spans in the rank's row of the board.

    Threads beside the main one share one lane.

    Args:
        row: the rank's row.
        recorder: whose spans they are.
    """

    def __init__(self, row: np.void, recorder: Recorder):
        self._names = row["kinds"]
        # A store into a memoryview takes a fraction of the time of a store into an array.
        self._seconds: list[Any] = [memoryview(row["kind_s"][lane]) for lane in range(2)]
        self._until_s: Any = memoryview(row["until_s"])
        self._begun: Any = memoryview(row["begun"])
        self._places: dict[str, int] = {}
        self._timer, self._origin = recorder.timer, recorder.origin
        # On a GPU, spans that the device has not reached yet.
        self._ahead: deque[tuple[str, Any, Any, int]] = deque()
        self._lock = threading.Lock()

    def begun(self, kind: str | None, lane: int) -> None:
        self._begun[lane > 0] = 0 if kind is None else self._place(kind) + 1

    def ended(self, kind: str, start: Any, end: Any, lane: int) -> None:
        with self._lock:
            self._ahead.append((kind, start, end, lane))
            while self._ahead and self._timer.is_past(self._ahead[0][2]):
                self._add(*self._ahead.popleft())

    def _add(self, kind: str, start: Any, end: Any, lane: int) -> None:
        start_s = self._timer.seconds(start, self._origin)
        end_s = self._timer.seconds(end, self._origin)
        self._seconds[lane > 0][self._place(kind)] += end_s - start_s
        self._until_s[lane > 0] = end_s

    def _place(self, kind: str) -> int:
        place = self._places.get(kind)
        if place is None:
            place = self._places[kind] = min(len(self._places), KINDS - 1)
            self._names[place] = kind.encode()
        return place
