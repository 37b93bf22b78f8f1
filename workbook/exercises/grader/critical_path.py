"""How long the calls of comm take if every rank goes on as soon as its peer is there.

A call of send needs its peer in the matching recv, so a chain of ranks that wait for each other
takes as many steps as it has links. An exchange sends and receives in the same step. On a link, a
message takes a latency and its bytes over the bandwidth instead of one step.

Symbols: P ranks.
"""

from collections.abc import Callable, Sequence

from workbook.exercises.grader.exercise import Step


def steps_in_a_row(calls: Sequence[Sequence[Step]]) -> int | None:
    """Return the length of the longest chain of messages; None if it cannot be told.

    Args:
        calls: by rank, the calls of comm in their order.
    """
    steps = _longest(calls, lambda num_bytes: 1)
    return None if steps is None else int(steps)


def seconds_in_a_row(
    calls: Sequence[Sequence[Step]], latency_s: float, bytes_per_s: float
) -> float | None:
    """Return the time that the messages take where each rank has a link; None if untold.

    A rank can send and receive at the same time, but only one message each way.
    """
    return _longest(calls, lambda num_bytes: latency_s + num_bytes / bytes_per_s)


def _longest(calls: Sequence[Sequence[Step]], cost: Callable[[int], float]) -> float | None:
    if any(name == "recv_any" for row in calls for name, *_ in row):
        return None
    chain = _Chain(calls, cost)
    while chain.advance():
        pass
    return max(chain.clock, default=0) if chain.at_the_end else None


class _Chain:
    """The ranks, each at its next call. ``clock`` [P] is the step that each has come to."""

    def __init__(self, calls: Sequence[Sequence[Step]], cost: Callable[[int], float]):
        self._calls = [[_halves(step) for step in row] for row in calls]
        self._costs = [[cost(step[3] if len(step) > 3 else 0) for step in row] for row in calls]
        self._at = [0] * len(calls)
        self.clock = [0.0] * len(calls)
        self._began = [0.0] * len(calls)

    @property
    def at_the_end(self) -> bool:
        return all(at == len(row) for at, row in zip(self._at, self._calls))

    def advance(self) -> bool:
        """Carry out all messages whose two ends are there; return whether there was any."""
        moved = False
        for rank in range(len(self._calls)):
            for kind, peer in list(self._open(rank)):
                if kind == "send" and ("recv", rank) in self._open(peer):
                    cost = self._costs[rank][self._at[rank]]
                    done = max(self._began[rank], self._began[peer]) + cost
                    self._close(rank, (kind, peer), done)
                    self._close(peer, ("recv", rank), done)
                    moved = True
        return moved

    def _open(self, rank: int) -> set[tuple[str, int]]:
        row, at = self._calls[rank], self._at[rank]
        return row[at] if at < len(row) else set()

    def _close(self, rank: int, half: tuple[str, int], done: float) -> None:
        self._open(rank).remove(half)
        self.clock[rank] = max(self.clock[rank], done)
        if not self._open(rank):
            self._at[rank] += 1
            self._began[rank] = self.clock[rank]


def _halves(step: Step) -> set[tuple[str, int]]:
    dst, src = step[1:3]
    sides = (("send", dst), ("recv", src))
    return {(kind, peer) for kind, peer in sides if peer is not None}
