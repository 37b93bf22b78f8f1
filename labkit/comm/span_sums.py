"""Seconds by kind of a rank's spans, added up on the status board while the rank runs.

The trace reaches the launcher only at the end of a run. What is shown before comes from these
sums: the launcher reads them some times a second, and the difference of two readings is what the
rank did in between.
"""

from typing import Any

import numpy as np

from labkit.comm.board import KINDS


class SpanSums:
    """Listens to one rank's recorder, and adds up its spans in the rank's row of the board.

    Threads beside the main one share one lane. On a GPU, a span is added once the device has
    reached its end.

    Args:
        row: the rank's row.
    """

    def __init__(self, row: np.void):
        self._names = row["kinds"]
        # A store into a memoryview takes a fraction of the time of a store into an array.
        self._seconds: list[Any] = [memoryview(row["kind_s"][lane]) for lane in range(2)]
        self._until_s: Any = memoryview(row["until_s"])
        self._begun: Any = memoryview(row["begun"])
        self._places: dict[str, int] = {}

    def begun(self, kind: str | None, lane: int) -> None:
        self._begun[lane > 0] = 0 if kind is None else self._place(kind) + 1

    def ended(self, kind: str, start_s: float, end_s: float, lane: int) -> None:
        self._seconds[lane > 0][self._place(kind)] += end_s - start_s
        self._until_s[lane > 0] = end_s

    def so_far(self, main_lane_only: bool = False) -> dict[str, float]:
        """Seconds by kind of the spans that have ended, in all lanes or in the main one."""
        lanes = self._seconds[:1] if main_lane_only else self._seconds
        return {kind: sum(s[place] for s in lanes) for kind, place in list(self._places.items())}

    def _place(self, kind: str) -> int:
        place = self._places.get(kind)
        if place is None:
            place = self._places[kind] = min(len(self._places), KINDS - 1)
            self._names[place] = kind.encode()
        return place
