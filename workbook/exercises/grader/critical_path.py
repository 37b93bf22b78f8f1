"""How long the calls of comm take if every rank goes on as soon as its peer is there.

A call of send needs its peer in the matching recv, so a chain of ranks that wait for each other
takes as many steps as it has links. An exchange sends and receives in the same step. On a link, a
message takes a latency and its bytes over the bandwidth instead of one step.
"""

from collections.abc import Callable, Sequence

# By rank, the calls of comm in their order: (name, dst, src, bytes).
Calls = Sequence[Sequence[tuple]]


def steps_in_a_row(calls: Calls) -> int | None:
    """Return the length of the longest chain of messages; None if it cannot be told."""
    steps = _longest(calls, lambda num_bytes: 1)
    return None if steps is None else int(steps)


def seconds_in_a_row(calls: Calls, latency_s: float, bytes_per_s: float) -> float | None:
    """Return the time that the messages take where each rank has a link; None if untold.

    A rank can send and receive at the same time, but only one message each way.
    """
    return _longest(calls, lambda num_bytes: latency_s + num_bytes / bytes_per_s)


def _longest(calls: Calls, cost: Callable[[int], float]) -> float | None:
    if any(name == "recv_any" for row in calls for name, *_ in row):
        return None
    # By rank: the next call, its halves that are still open, when it began, when it ends.
    next_, clock = [0] * len(calls), [0.0] * len(calls)
    began = [0.0] * len(calls)
    opened = [_halves(row, 0) for row in calls]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(calls):
            for kind, peer in list(opened[rank]):
                if kind != "send" or ("recv", rank) not in opened[peer]:
                    continue
                moved = True
                ended = max(began[rank], began[peer]) + cost(row[next_[rank]][3])
                opened[rank].remove((kind, peer))
                opened[peer].remove(("recv", rank))
                for end in {rank, peer}:
                    clock[end] = max(clock[end], ended)
                    if not opened[end]:
                        next_[end] += 1
                        began[end] = clock[end]
                        opened[end] = _halves(calls[end], next_[end])
    at_the_end = all(at == len(row) for at, row in zip(next_, calls))
    return max(clock, default=0) if at_the_end else None


def _halves(row: Sequence[tuple], at: int) -> set[tuple[str, int]]:
    if at >= len(row):
        return set()
    sides = (("send", row[at][1]), ("recv", row[at][2]))
    return {(kind, peer) for kind, peer in sides if peer is not None}
