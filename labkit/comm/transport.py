"""The interface of all transports, which move and count the bytes for ``Comm``."""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Sent:
    """The messages and payload bytes sent to one rank, counted where they are handed over."""

    messages: int = 0
    num_bytes: int = 0

    def count(self, num_bytes: int, begins_message: bool = True) -> None:
        """Count a message, or a later segment of the same message."""
        self.messages += begins_message
        self.num_bytes += num_bytes


class Traffic:
    """The messages and payload bytes sent to all ranks; ``to`` holds them by destination.

    Several threads may send at once, each to its own destination. ``collective`` is the one that
    this rank is in, by name and arguments; empty in none.
    """

    def __init__(self):
        self.collective = ""
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


class Transport(ABC):
    """Moves one rank's messages; ``Comm`` checks the arguments and times the operations.

    Tensors are dense, contiguous and detached, of any shape and dtype; a peer is another rank.

    Attributes:
        sent: counts what was sent. A message is one send, or one chunk that a collective writes
            directly into a channel, however many segments it has.
        shares_memory: whether there are channels between all ranks.
        receives_from_any: whether it can ``expect`` messages of several ranks at once.
        link: the emulated link that the messages take; None for no emulation.

    Raises (every operation): PeerLostError if the peer has ended, or the timeout has passed.
    """

    shares_memory = False
    receives_from_any = False
    link: Any = None

    def __init__(self):
        self.sent = Traffic()

    @abstractmethod
    def send(self, tensor: Tensor, dst: int) -> None:
        """Send ``tensor``; after the return, work that is queued next may overwrite it."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int) -> None: ...

    @abstractmethod
    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        """Send and receive; neither waits for the other. The two tensors share no memory."""

    @contextmanager
    def exchanging(self, send: Tensor, dst: int, recv: Tensor, src: int) -> Iterator[None]:
        """Exchange while the block runs, where messages move by themselves; otherwise before."""
        self.exchange(send, dst, recv, src)
        yield

    @abstractmethod
    def barrier(self) -> None: ...

    def recv_add(self, tensor: Tensor, src: int) -> None:
        """Receive a tensor from ``src`` and add it to ``tensor``."""
        landing = torch.empty_like(tensor)
        self.recv(landing, src)
        tensor += landing

    def expect(self, tensor: Tensor, sources: Sequence[int]) -> None:
        """Begin to receive one message like ``tensor`` from each source; ``recv`` takes it."""
        raise NotImplementedError

    def arrived(self, tensor: Tensor, sources: Sequence[int]) -> Mapping[int, float]:
        """The sources whose expected message has come, or will not come, and when, in seconds."""
        return {}

    def channel_to(self, dst: int) -> Any:
        """The slots in which rank ``dst`` reads what this rank writes."""
        raise NotImplementedError

    def channel_from(self, src: int) -> Any:
        """The slots that rank ``src`` writes and this rank reads."""
        raise NotImplementedError

    @abstractmethod
    def set_timeout(self, timeout_s: float) -> None:
        """Set the longest wait for a message from now on."""

    def abandon(self) -> None:  # noqa: B027
        """End every operation that still waits, in any thread, with an error, if possible."""

    def close(self) -> None:  # noqa: B027
        """Close at the end of a run, when every message that was sent has been received."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor of any dtype, as a uint8 view [n]."""
    # A contiguous tensor of at most one element may have any stride, which a view does not take.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
