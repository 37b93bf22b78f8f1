"""What each rank did, in slots of equal length: while ranks run, and from the trace of a run."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from labkit.comm.board import Board
from labkit.tracing import Span, Trace

# {kind: [slots] its share of each slot}
Shares = dict[str, np.ndarray]
_MOST_READINGS = 240
# Over this time, the rate of steps or samples is measured.
_RATE_S = 2.0
_MAIN, _BESIDE = 0, 1
_COLUMNS = ("until_s", "kind_s", "begun", "samples", "done")


@dataclass(frozen=True)
class Lane:
    """One rank's lane: its main thread, and all its other threads together ``beside`` it.

    ``device`` is its GPU by name; empty on the CPU, and while it is not known.
    """

    rank: int
    shares: Shares
    beside: Shares = field(default_factory=dict)
    device: str = ""


@dataclass(frozen=True)
class _Reading:
    """The board at one moment: some of its columns, and whether each rank is in a transfer [P]."""

    now_s: float
    columns: dict[str, np.ndarray]
    waits: np.ndarray


class History:
    """Readings of a status board while its ranks run.

    The board has sums over all spans so far, so the difference of two readings is what a rank did
    in between, however short its spans are.
    """

    def __init__(self, board: Board):
        self._board = board
        self._readings: list[_Reading] = []

    def read(self, now_s: float) -> None:
        """Read the board; ``now_s`` is in seconds of the trace."""
        rows = self._board.ranks
        columns = {name: rows[name].copy() for name in _COLUMNS}
        self._readings.append(_Reading(now_s, columns, rows["op"] != b""))
        if len(self._readings) > _MOST_READINGS:
            # Every second reading of the older half.
            half = _MOST_READINGS // 2
            self._readings[:half] = self._readings[:half:2]

    def lanes(self, ranks: Iterable[int], edges_s: np.ndarray) -> list[Lane]:
        """The lanes of these ranks in the slots between ``edges_s`` [slots + 1]."""
        kinds = [
            [name.decode(errors="replace") for name in row if name]
            for row in self._board.ranks["kinds"]
        ]
        until_s, sums = self._column("until_s"), self._column("kind_s")

        def shares(rank: int, lane: int) -> Shares:
            mine = until_s[:, rank, lane], sums[:, rank, lane]
            return self._shares(rank, lane, kinds[rank], *mine, edges_s)

        return [Lane(rank, shares(rank, _MAIN), shares(rank, _BESIDE)) for rank in ranks]

    def _shares(
        self,
        rank: int,
        lane: int,
        kinds: list[str],
        until_s: np.ndarray,
        sums: np.ndarray,
        edges_s: np.ndarray,
    ) -> Shares:
        """From the ends of the last spans [readings] and the sums by kind [readings, K]."""
        last = self._readings[-1]
        going = self._going(last, rank, lane, kinds)
        found = {}
        for place, kind in enumerate([*kinds, *({going} - {*kinds, ""})]):
            seconds = sums[:, place] if place < len(kinds) else np.zeros(len(sums))
            going_s = (last.now_s - until_s[-1]) * (kind == going)
            times = np.concatenate([[0.0], until_s, [max(last.now_s, until_s[-1])]])
            seconds = np.concatenate([[0.0], seconds, [seconds[-1] + max(0.0, going_s)]])
            if seconds[-1] > 0:
                found[kind] = _by_slot(times, seconds, edges_s, last.now_s)
        return found

    def _going(self, last: _Reading, rank: int, lane: int, kinds: list[str]) -> str:
        """The kind of the span that has not ended; a transfer counts as waiting until it has."""
        # Another thread's transfer, such as that of DDP's communication thread, looks the same.
        is_alone = not last.columns["until_s"][rank, _BESIDE]
        if lane == _MAIN and last.waits[rank] and is_alone:
            return "wait"
        begun = int(last.columns["begun"][rank, lane])
        return kinds[begun - 1] if 0 < begun <= len(kinds) else ""

    def _column(self, name: str) -> np.ndarray:
        """[readings, P, ...]"""
        return np.stack([reading.columns[name] for reading in self._readings])

    def rates(self, name: str) -> np.ndarray:
        """``samples`` or ``done`` (steps) per second in the last seconds, [P]."""
        last = self._readings[-1]
        first = next(r for r in self._readings if r.now_s >= last.now_s - _RATE_S)
        passed_s = max(1e-9, last.now_s - first.now_s)
        return (last.columns[name] - first.columns[name]) / passed_s


def trace_lanes(trace: Trace, ranks: Iterable[int], edges_s: np.ndarray) -> list[Lane]:
    """The lanes of these ranks from the spans themselves."""
    mine: dict[tuple[int, str, int], list[Span]] = {}
    for span in trace.spans:
        mine.setdefault((span.rank, span.kind, span.lane), []).append(span)
    gpus = {rank: name for rank, name in trace.devices.items() if name != "cpu"}
    lanes = {rank: Lane(rank, {}, device=gpus.get(rank, "")) for rank in ranks}
    for (rank, kind, number), spans in mine.items():
        if rank in lanes:
            shares = lanes[rank].beside if number else lanes[rank].shares
            # Spans of one kind and lane are in order and do not overlap.
            times = np.array([(span.start_s, span.end_s) for span in spans])
            ends = np.cumsum(times[:, 1] - times[:, 0])
            seconds = np.stack([ends - (times[:, 1] - times[:, 0]), ends], axis=1)
            part = _by_slot(times.ravel(), seconds.ravel(), edges_s, edges_s[-1])
            shares[kind] = shares.get(kind, 0.0) + part
    return list(lanes.values())


def _by_slot(
    times: np.ndarray, seconds: np.ndarray, edges_s: np.ndarray, now_s: float
) -> np.ndarray:
    """[slots]: shares of the slots, from the ``seconds`` that had been spent at ``times``."""
    at = np.interp(np.minimum(edges_s, now_s), times, seconds, left=0.0)
    widths = np.diff(np.minimum(edges_s, now_s))
    return np.clip(np.diff(at) / np.maximum(widths, 1e-9), 0.0, 1.0) * (widths > 0)
