"""The coordinator of negotiated collectives: rank 0, which receives what every rank has submitted.

During backward one rank may finish gradient "a" first, and another gradient "b". If each began a
ring for its own, neither would end. So nothing begins before all ranks have it, and all run the
same list in the same order, which rank 0 makes.

Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow"
(2018), sections 3 and 4.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

# All ranks wait, and none has submitted anything: after this time none will.
STUCK_S = 3.0


class Coordinator:
    """The collectives that some ranks have submitted: by name, the description of each rank."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._submitted: dict[str, dict[int, str]] = {}
        self._last_news_s = 0.0

    def decide(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Take the ranks' messages of one cycle, and return the names that all of them run.

        The names are in the order in which they run. With each comes the error why it cannot run,
        or an empty text.

        Args:
            messages: by rank: the descriptions of what is ``new``, by name, and whether the rank
                ``waits`` and submits no more.
        """
        for rank, message in enumerate(messages):
            for name, description in message["new"].items():
                self._submitted.setdefault(name, {})[rank] = description
        errors = {}
        for name, descriptions in list(self._submitted.items()):
            if len(descriptions) == self._world_size:
                errors[name] = _explain_difference(name, self._submitted.pop(name))
        if any(message["new"] or not message["waits"] for message in messages):
            self._last_news_s = time.monotonic()
        elif time.monotonic() - self._last_news_s > STUCK_S:
            errors = dict.fromkeys(self._submitted, self._explain_deadlock())
            self._submitted.clear()
        return errors

    def _explain_deadlock(self) -> str:
        lines = ["deadlock: all ranks wait, each for something that others have not submitted:"]
        for name, descriptions in self._submitted.items():
            missing = set(range(self._world_size)) - descriptions.keys()
            lines.append(
                f"  {next(iter(descriptions.values()))} {name!r}: submitted by rank "
                f"{', '.join(map(str, descriptions))}, not by rank {', '.join(map(str, missing))}"
            )
        lines.append("Next step: submit the same names on all ranks, without a name in one order.")
        return "\n".join(lines)


def _explain_difference(name: str, descriptions: Mapping[int, str]) -> str:
    """Say what each rank has under a name; empty if all have the same."""
    if len(set(descriptions.values())) == 1:
        return ""
    lines = [f"the ranks do not agree on {name!r}:"]
    for rank in sorted(descriptions):
        lines.append(f"  rank {rank} has {descriptions[rank]}")
    lines.append("Next step: give all ranks the same, or use another name for each.")
    return "\n".join(lines)
