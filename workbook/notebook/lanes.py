"""The work of each rank's main thread so far, in slots of equal length, from the board."""

from collections.abc import Iterable

import numpy as np
from numpy.lib.recfunctions import repack_fields

from labkit.engine.comm.board import KINDS, Board

# {kind: [slots] its share of each slot}
Shares = dict[str, np.ndarray]
# Over this time, the rate of steps or samples is measured.
_RATE_S = 2.0
# The lanes of a rank on the board: its own thread, and another one.
_MAIN = 0
_BESIDE = 1
_COLUMNS = ["until_s", "kind_s", "begun", "samples", "done", "op"]


class History:
    """Readings of a status board while its ranks run.

    The board has sums over all spans so far, so the difference of two readings is what a rank did
    in between, however short its spans are.
    """

    def __init__(self, board: Board):
        self._board = board
        self._times_s: list[float] = []
        self._readings: list[np.ndarray] = []

    def read(self, now_s: float) -> None:
        """Read the board; ``now_s`` is in seconds of the trace."""
        self._times_s.append(now_s)
        self._readings.append(repack_fields(self._board.ranks[_COLUMNS]))

    def lanes(self, ranks: Iterable[int], edges_s: np.ndarray) -> list[Shares]:
        """The lanes of these ranks in the slots between ``edges_s`` [slots + 1]."""
        readings = np.stack(self._readings)
        lanes = []
        edges_s = np.minimum(edges_s, self._times_s[-1])
        slots_s = np.maximum(np.diff(edges_s), 1e-9)
        for rank in ranks:
            kinds = [name.decode(errors="replace") for name in self._board.ranks["kinds"][rank]]
            rows = readings[:, rank]
            last = rows[-1]
            begun = int(last["begun"][_MAIN])
            going = kinds[begun - 1] if begun else ""
            # A transfer counts as waiting until it has ended. That of another thread, such as
            # DDP's communication thread, looks the same.
            if last["op"] and not last["until_s"][_BESIDE]:
                going = "wait"
            until_s = rows["until_s"][:, _MAIN]
            end_s = max(self._times_s[-1], until_s[-1])
            times_s = np.concatenate([[0.0], until_s, [end_s]])
            shares = {}
            # A kind that the board does not know yet has a column with no seconds.
            for column, kind in enumerate(dict.fromkeys([*filter(None, kinds), going])):
                seconds = rows["kind_s"][:, _MAIN, min(column, KINDS - 1)]
                going_s = 0.0
                if kind == going:
                    going_s = end_s - until_s[-1]
                seconds = np.concatenate([[0.0], seconds, [seconds[-1] + going_s]])
                if kind and seconds[-1] > 0:
                    spent_s = np.diff(np.interp(edges_s, times_s, seconds))
                    shares[kind] = np.clip(spent_s / slots_s, 0.0, 1.0)
            lanes.append(shares)
        return lanes

    def rates(self, column: str) -> np.ndarray:
        """``samples`` or ``done`` (steps) per second in the last seconds, [P]."""
        now_s = self._times_s[-1]
        num_recent = sum(time_s >= now_s - _RATE_S for time_s in self._times_s)
        first = -min(max(2, num_recent), len(self._times_s))
        passed_s = max(1e-9, now_s - self._times_s[first])
        return (self._readings[-1][column] - self._readings[first][column]) / passed_s
