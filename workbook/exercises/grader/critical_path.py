"""How long the calls of comm take if every rank goes on as soon as its peer is there.

A call of send needs its peer in the matching recv, so a chain of ranks that wait for each other
takes as many steps as it has links. An exchange sends and receives in the same step.
"""

import math
from collections.abc import Sequence

# By rank, the calls of comm in their order: (name, dst, src, bytes).
Calls = Sequence[Sequence[tuple]]


def steps_in_a_row(calls: Calls) -> int | None:
    """Return the length of the longest chain of messages; None if it cannot be told."""
    steps = seconds_in_a_row(calls, 1.0, math.inf)
    return None if steps is None else int(steps)


def seconds_in_a_row(calls: Calls, latency_s: float, bytes_per_s: float) -> float | None:
    """Return the time that the messages take where each rank has a link; None if untold.

    A message takes a latency, and its bytes over the bandwidth. A rank can send and receive at
    the same time, but only one message each way.
    """
    if any(name == "recv_any" for row in calls for name, *_ in row):
        return None
    # By rank: its next call, when that began, what of it has ended, and when the latest ended.
    P = len(calls)
    at, began, done, ended = [0] * P, [0.0] * P, [set[int]() for _ in calls], [0.0] * P

    def peer(rank: int, way: int) -> int | None:
        """To which (way 1) or from which (2) the rank's next call still has a message."""
        here = at[rank] < len(calls[rank]) and way not in done[rank]
        return calls[rank][at[rank]][way] if here else None

    moved = True
    while moved:
        moved = False
        for rank in range(P):
            dst = peer(rank, 1)
            if dst is None or peer(dst, 2) != rank:
                continue
            moved = True
            end_s = max(began[rank], began[dst]) + latency_s
            end_s += calls[rank][at[rank]][3] / bytes_per_s
            for one, way in ((rank, 1), (dst, 2)):
                done[one].add(way)
                ended[one] = max(ended[one], end_s)
            for one in {rank, dst}:
                if peer(one, 1) is None and peer(one, 2) is None:
                    at[one], began[one], done[one] = at[one] + 1, ended[one], set()
    return max(ended, default=0) if at == list(map(len, calls)) else None
