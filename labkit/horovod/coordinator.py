"""The coordinator of negotiated collectives: rank 0, which hears what every rank has submitted.

During backward one rank may finish gradient "a" first, and another gradient "b". If each began a
ring for its own, neither would end. So nothing begins before all ranks have it, and all carry out
the same list in the same order, which rank 0 makes.

Symbols: P ranks. Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning
in TensorFlow" (2018), sections 3 and 4.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# All ranks wait, and none has submitted anything: after this time none will.
STUCK_S = 3.0


class Request(NamedTuple):
    """A name that one rank has submitted, and what must be equal on all; it travels as JSON.

    Of an allgather, ``rows`` is the first dimension of the rank's tensor, which may differ.
    """

    name: str
    description: str
    rows: int = 0


class Decision(NamedTuple):
    """A name that all ranks carry out, or why they cannot, and by rank the ``rows`` of it."""

    name: str
    error: str
    rows: Sequence[int] = ()


class Coordinator:
    """The requests that ranks have submitted and not carried out yet, by name and rank."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._table: dict[str, dict[int, Request]] = {}
        self._last_news_s = 0.0

    def decide(self, everyone: Sequence[Mapping[str, Any]]) -> list[Decision]:
        """Take the ranks' messages of one cycle, and return what all of them carry out, in order.

        Args:
            everyone: by rank: the ``new`` requests, and whether the rank ``waits`` and submits no
                more.
        """
        for rank, message in enumerate(everyone):
            for values in message["new"]:
                request = Request(*values)
                self._table.setdefault(request.name, {})[rank] = request
        ready = [name for name, by_rank in self._table.items() if len(by_rank) == self._world_size]
        decided = [_compare(name, self._table.pop(name)) for name in ready]
        if any(message["new"] or not message["waits"] for message in everyone):
            self._last_news_s = time.monotonic()
        elif time.monotonic() - self._last_news_s > STUCK_S:
            error = self._explain_deadlock()
            decided += [Decision(name, error) for name in self._table]
            self._table.clear()
        return decided

    def _explain_deadlock(self) -> str:
        lines = ["deadlock: all ranks wait, each for something that others have not submitted:"]
        for name, by_rank in self._table.items():
            missing = set(range(self._world_size)) - by_rank.keys()
            description = next(iter(by_rank.values())).description
            lines.append(
                f"  {description} {name!r}: submitted by rank {', '.join(map(str, by_rank))}, "
                f"not by rank {', '.join(map(str, missing))}"
            )
        lines.append("Next step: submit the same names on all ranks, without a name in one order.")
        return "\n".join(lines)


def _compare(name: str, by_rank: Mapping[int, Request]) -> Decision:
    """Agree on a name that all ranks have submitted."""
    error = ""
    if len({request.description for request in by_rank.values()}) > 1:
        lines = [f"the ranks do not agree on {name!r}:"]
        lines += [f"  rank {rank} has {by_rank[rank].description}" for rank in sorted(by_rank)]
        lines.append("Next step: give all ranks the same, or use another name for each.")
        error = "\n".join(lines)
    return Decision(name, error, [by_rank[rank].rows for rank in sorted(by_rank)])
