"""The interface of all transports, which move the bytes for ``Comm``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from labkit.comm.channels import Channel
from labkit.comm.sent import Traffic


class Transport(ABC):
    """Moves one rank's messages; ``Comm`` checks the arguments and times the operations.

    Tensors are dense, contiguous and detached, of any shape and dtype; a peer is another rank.

    Attributes:
        sent: the counters of what was sent. A message is one send, or one chunk that a collective
            writes directly into a channel, however many segments it has.
        shares_memory: whether there are channels (``channel_to``, ``channel_from``) between all
            ranks. Between some of them: ``shares_memory_with``.
        receives_from_any: whether it can ``expect`` messages of several ranks at once.
        ends_together: whether all ranks have to meet before one may close.
        queues: whether operations are only queued when they return, in one order (NCCL). Then
            ``take_queued`` says what was queued, and ``abort`` ends it.
        collective: the one that this rank is in, by name and arguments; empty in none. Where it is
            a part of the message, messages of two different collectives never meet.

    Raises (every operation): PeerLostError if the peer has ended, or the timeout has passed.
    """

    shares_memory = False
    receives_from_any = False
    ends_together = False
    queues = False
    collective = ""

    def __init__(self):
        self.sent = Traffic()

    @abstractmethod
    def send(self, tensor: Tensor, dst: int) -> None:
        """Send ``tensor``; after the return, work that is queued next may overwrite it."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive into ``tensor``."""

    @abstractmethod
    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        """Send and receive; neither waits for the other. The two tensors share no memory."""

    @contextmanager
    def exchanging(self, send: Tensor, dst: int, recv: Tensor, src: int) -> Iterator[None]:
        """Exchange while the block runs, where messages move by themselves; otherwise after it."""
        yield
        self.exchange(send, dst, recv, src)

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    def recv_add(self, tensor: Tensor, src: int) -> None:
        """Receive a tensor from ``src`` and add it to ``tensor``."""
        landing = torch.empty_like(tensor)
        self.recv(landing, src)
        tensor += landing

    def expect(self, tensor: Tensor, sources: Sequence[int], ring: Callable[[], None]) -> None:
        """Begin to receive one message like ``tensor`` from each source; ``recv`` takes it later.

        Args:
            sources: ranks that post nothing on this rank's board.
            ring: called in another thread whenever one of them has come.
        """
        raise NotImplementedError(f"{type(self).__name__} receives from named ranks only")

    def arrived(self, tensor: Tensor, sources: Sequence[int]) -> Mapping[int, float]:
        """The sources whose expected message has come, or will not come, and when, in seconds."""
        return {}

    def shares_memory_with(self, peer: int) -> bool:
        """Whether there are channels to and from ``peer``."""
        return self.shares_memory

    def channel_to(self, dst: int) -> Channel:
        """The slots in which rank ``dst`` reads what this rank writes."""
        raise NotImplementedError(f"the ranks of a {type(self).__name__} share no memory")

    def channel_from(self, src: int) -> Channel:
        """The slots that rank ``src`` writes and this rank reads."""
        raise NotImplementedError(f"the ranks of a {type(self).__name__} share no memory")

    def take_queued(self) -> list[Any]:
        """The ``dist.Work`` of what this thread has queued since its last call."""
        return []

    def stream(self) -> int:
        """The current stream, which waits for what is queued now; one number for each."""
        return 0

    def abort(self) -> None:
        """End all that is queued, on this rank, without waiting for any peer."""
        assert not self.queues

    @abstractmethod
    def set_timeout(self, timeout_s: float) -> None:
        """Set the longest wait for a message from now on."""

    @abstractmethod
    def abandon(self) -> None:
        """End every operation that still waits, in any thread, with an error."""

    @abstractmethod
    def close(self) -> None:
        """Close at the end of a run, when every message that was sent has been received."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor of any dtype, as a uint8 view [n]."""
    # A contiguous tensor of at most one element may have any stride, which a view does not take.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
