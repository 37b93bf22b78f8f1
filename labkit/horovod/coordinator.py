"""The coordinator of negotiated collectives: rank 0, which receives what every rank has submitted.

During backward one rank may finish gradient "a" first, and another gradient "b". If each began a
ring for its own, neither would end. So nothing begins before all ranks have it, and all run the
same list in the same order, which rank 0 makes.

Symbols: P ranks. Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning
in TensorFlow" (2018), sections 3 and 4.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# All ranks wait, and none has submitted anything: after this time none will.
STUCK_S = 3.0


class Request(NamedTuple):
    """A name that one rank has submitted, and what must be equal on all; it travels as JSON."""

    name: str
    description: str


class Decision(NamedTuple):
    """A name that all ranks run, or the error why they cannot."""

    name: str
    error: str


class Coordinator:
    """The requests that ranks have submitted and not run yet, by name and rank."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._requests: dict[str, dict[int, Request]] = {}
        self._last_news_s = 0.0

    def decide(self, messages: Sequence[Mapping[str, Any]]) -> list[Decision]:
        """Take the ranks' messages of one cycle, and return what all of them run, in order.

        Args:
            messages: by rank: the ``new`` requests, and whether the rank ``waits`` and submits no
                more.
        """
        for rank, message in enumerate(messages):
            for values in message["new"]:
                request = Request(*values)
                self._requests.setdefault(request.name, {})[rank] = request
        decisions = []
        for name, by_rank in list(self._requests.items()):
            if len(by_rank) == self._world_size:
                decisions.append(_compare(name, self._requests.pop(name)))
        if any(message["new"] or not message["waits"] for message in messages):
            self._last_news_s = time.monotonic()
        elif time.monotonic() - self._last_news_s > STUCK_S:
            error = self._explain_deadlock()
            decisions += [Decision(name, error) for name in self._requests]
            self._requests.clear()
        return decisions

    def _explain_deadlock(self) -> str:
        lines = ["deadlock: all ranks wait, each for something that others have not submitted:"]
        for name, by_rank in self._requests.items():
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
    if len({request.description for request in by_rank.values()}) == 1:
        return Decision(name, error="")
    lines = [f"the ranks do not agree on {name!r}:"]
    for rank in sorted(by_rank):
        lines.append(f"  rank {rank} has {by_rank[rank].description}")
    lines.append("Next step: give all ranks the same, or use another name for each.")
    return Decision(name, "\n".join(lines))
