"""Counters of sent messages and bytes: the only place where they are counted.

Every transport calls ``Sent.count`` where it hands the bytes over, so the numbers are measured and
do not come from a formula.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass


@dataclass
class Sent:
    """The messages and payload bytes sent to one rank."""

    messages: int = 0
    num_bytes: int = 0

    def count(self, num_bytes: int, begins_message: bool = True) -> None:
        """Count a message, or a later segment of the same message."""
        self.messages += begins_message
        self.num_bytes += num_bytes


class Traffic:
    """The messages and payload bytes sent to all ranks.

    Several threads may send at once, each to a different rank: so each destination has its own
    counters.

    Attributes:
        to: the counters by destination.
    """

    def __init__(self):
        self.to: defaultdict[int, Sent] = defaultdict(Sent)

    @property
    def messages(self) -> int:
        return sum(sent.messages for sent in list(self.to.values()))

    @property
    def num_bytes(self) -> int:
        return sum(sent.num_bytes for sent in list(self.to.values()))

    @property
    def bytes_to(self) -> Counter[int]:
        """Payload bytes by destination, for the ranks that have been sent a message."""
        sent_to = list(self.to.items())
        return Counter({dst: sent.num_bytes for dst, sent in sent_to if sent.messages})
