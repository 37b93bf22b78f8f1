"""How long the calls of comm take if every rank goes on as soon as its peer is there.

A call of send needs its peer in the matching recv, so a chain of ranks that wait for each other
takes as many steps as it has links. An exchange sends and receives in the same step.
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

    A message takes a latency, and its bytes over the bandwidth. A rank can send and receive at
    the same time, but only one message each way.
    """
    return _longest(calls, lambda num_bytes: latency_s + num_bytes / bytes_per_s)


def _longest(calls: Calls, cost: Callable[[int], float]) -> float | None:
    if any(name == "recv_any" for row in calls for name, *_ in row):
        return None

    def halves(rank: int) -> set[tuple[str, int]]:
        """The peers of the rank's next call."""
        _, dst, src, *_ = calls[rank][next_[rank]] if next_[rank] < len(calls[rank]) else _NONE
        return {(kind, peer) for kind, peer in (("send", dst), ("recv", src)) if peer is not None}

    # By rank: its next call, when that began, what of it is still open, and when the latest ended.
    next_, began, ended = [0] * len(calls), [0.0] * len(calls), [0.0] * len(calls)
    opened = [halves(rank) for rank in range(len(calls))]
    moved = True
    while moved:
        moved = False
        for rank in range(len(calls)):
            for kind, peer in list(opened[rank]):
                if kind != "send" or ("recv", rank) not in opened[peer]:
                    continue
                moved = True
                end_s = max(began[rank], began[peer]) + cost(calls[rank][next_[rank]][3])
                opened[rank].remove((kind, peer))
                opened[peer].remove(("recv", rank))
                for one in {rank, peer}:
                    ended[one] = max(ended[one], end_s)
                    if not opened[one]:
                        next_[one], began[one] = next_[one] + 1, ended[one]
                        opened[one] = halves(one)
    at_the_end = all(at == len(row) for at, row in zip(next_, calls))
    return max(ended, default=0) if at_the_end else None


_NONE = ("", None, None)
