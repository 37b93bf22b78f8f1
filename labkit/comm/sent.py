"""What has left a rank: the one place where messages and bytes are counted.

Every transport calls ``Sent.count`` where it hands the bytes over. No formula is asked.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass


@dataclass
class Sent:
    """What has left for one rank."""

    messages: int = 0
    num_bytes: int = 0

    def count(self, num_bytes: int, begins_message: bool = True) -> None:
        """A message, or a later segment of one, has left."""
        self.messages += begins_message
        self.num_bytes += num_bytes


class Traffic:
    """What has left for all ranks.

    Several threads may send at once, each to another rank: so each rank has its own counters.

    Attributes:
        to: by destination.
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
        """By destination; only ranks that have been sent a message."""
        sent_to = list(self.to.items())
        return Counter({dst: sent.num_bytes for dst, sent in sent_to if sent.messages})
