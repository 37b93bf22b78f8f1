"""The time that the calls of comm take if every rank goes on as soon as its peer is there.

A call of send needs its peer in the matching recv, so a chain of ranks that wait for each other
takes as many steps as it has links. An exchange sends and receives in the same step.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

# By rank, the calls of comm in their order: (name, dst, src, bytes).
Calls = Sequence[Sequence[tuple]]


_DST, _SRC, _BYTES = 1, 2, 3  # the places in a call


def steps_in_a_row(calls: Calls) -> int | None:
    """Return the length of the longest chain of messages; None if it cannot be told."""
    steps = seconds_in_a_row(calls, 1.0, math.inf)
    if steps is None:
        return None
    return int(steps)


class LongestWait(NamedTuple):
    """The longest time for which a rank waits for a peer, and the number of its call, from 1."""

    rank: int
    peer: int
    wait_s: float
    call: int


def seconds_in_a_row(calls: Calls, latency_s: float, bytes_per_s: float) -> float | None:
    """Return the time that the messages take where each rank has a link; None if untold.

    A message takes a latency, and its bytes over the bandwidth. A rank can send and receive at
    the same time, but only one message each way.
    """
    played = _play(calls, latency_s, bytes_per_s)
    return None if played is None else played[0]


def longest_wait(calls: Calls, latency_s: float, bytes_per_s: float) -> LongestWait | None:
    """Return the longest wait, by the same clock; None if it is untold, or no rank waits."""
    played = _play(calls, latency_s, bytes_per_s)
    return None if played is None else played[1]


def _play(
    calls: Calls, latency_s: float, bytes_per_s: float
) -> tuple[float, LongestWait | None] | None:
    """The end of the last message, and the longest wait before one."""
    ranks = [_Progress(row) for row in calls]
    if any(name == "recv_any" for row in calls for name, *_ in row):
        return None
    waits = []
    moved = True
    while moved:
        moved = False
        for rank, sender in enumerate(ranks):
            dst = sender.peer(_DST)
            if dst is None or ranks[dst].peer(_SRC) != rank:
                continue
            moved = True
            receiver = ranks[dst]
            start_s = max(sender.began_s, receiver.began_s)
            for waiting, own, peer in ((rank, sender, dst), (dst, receiver, rank)):
                waits.append(LongestWait(waiting, peer, start_s - own.began_s, own.index + 1))
            end_s = start_s + latency_s + sender.calls[sender.index][_BYTES] / bytes_per_s
            sender.end(_DST, end_s)
            receiver.end(_SRC, end_s)
    if any(rank.index < len(rank.calls) for rank in ranks):
        return None
    longest = max(waits, key=lambda wait: wait.wait_s, default=None)
    if longest and longest.wait_s == 0:
        longest = None
    return max((rank.ended_s for rank in ranks), default=0), longest


class _Progress:
    """A rank's next call, when it began, which halves of it have ended, and the latest end."""

    def __init__(self, calls: Sequence[tuple]):
        self.calls = calls
        self.index = 0
        self.began_s = self.ended_s = 0.0
        self._done: set[int] = set()

    def peer(self, half: int) -> int | None:
        """The peer to (_DST) or from (_SRC) which the rank's next call still has a message."""
        if self.index == len(self.calls) or half in self._done:
            return None
        return self.calls[self.index][half]

    def end(self, half: int, end_s: float) -> None:
        """End one half of the next call, and the call if it has no other."""
        self._done.add(half)
        self.ended_s = max(self.ended_s, end_s)
        if self.peer(_DST) is None and self.peer(_SRC) is None:
            self.index += 1
            self.began_s = self.ended_s
            self._done = set()
