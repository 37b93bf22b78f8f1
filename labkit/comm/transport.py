"""How bytes travel: the interface of every transport below ``Comm``."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from labkit.comm.channels import Channel
from labkit.comm.sent import Traffic


class Transport(ABC):
    """One rank's way to move bytes; ``Comm`` checks the arguments, times and explains.

    Tensors come dense, contiguous and detached, of any shape and dtype; a peer is another rank.

    Attributes:
        sent: counted as it leaves. A message is one send, or one chunk that a collective moves
            through a channel by itself, however many segments it has.
        shares_memory: whether there are channels (``channel_to``, ``channel_from``).
        receives_from_any: whether there is ``recv_any``.
        ends_together: whether all ranks have to meet before one may close.

    Raises (every operation): PeerLostError, when the peer has ended or does not come in time.
    """

    shares_memory = False
    receives_from_any = False
    ends_together = False

    def __init__(self):
        self.sent = Traffic()

    @abstractmethod
    def send(self, tensor: Tensor, dst: int) -> None:
        """Returns when ``tensor`` may be overwritten by whatever is queued next."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive into ``tensor``."""

    @abstractmethod
    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        """Both at once: neither waits for the other. The two tensors share no memory."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    def recv_add(self, tensor: Tensor, src: int) -> None:
        """Receive from ``src`` and add it to ``tensor``."""
        landing = torch.empty_like(tensor)
        self.recv(landing, src)
        tensor += landing

    def recv_any(self, tensor: Tensor) -> int:
        """Receive into ``tensor`` from any other rank; returns which."""
        raise NotImplementedError(f"{type(self).__name__} receives from named ranks only")

    def channel_to(self, dst: int) -> Channel:
        """The slots in which rank ``dst`` reads what this rank writes."""
        raise NotImplementedError(f"the ranks of a {type(self).__name__} share no memory")

    def channel_from(self, src: int) -> Channel:
        """The slots that rank ``src`` writes and this rank reads."""
        raise NotImplementedError(f"the ranks of a {type(self).__name__} share no memory")

    @abstractmethod
    def set_timeout(self, timeout_s: float) -> None:
        """The longest wait for a message from now on."""

    @abstractmethod
    def abandon(self) -> None:
        """End whatever still waits, in any thread, with an error."""

    @abstractmethod
    def close(self) -> None:
        """The end of a run: what was sent has been received, and needs nothing of this rank."""


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes [n], whatever its dtype."""
    return tensor.reshape(-1).view(torch.uint8)
