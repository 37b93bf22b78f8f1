"""How bytes travel: what every transport does for ``Comm``, and the one over torch.distributed.

What has left is counted in ``Sent.count`` alone: every transport calls it where it hands the bytes
over, and no formula is asked.
"""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.errors import PeerLostError


@dataclass
class Sent:
    """What has left for one rank."""

    messages: int = 0
    num_bytes: int = 0

    def count(self, num_bytes: int, begins_message: bool = True) -> None:
        """A message, or a segment of one that has begun, has left."""
        self.messages += begins_message
        self.num_bytes += num_bytes


class Traffic:
    """What has left for all ranks.

    Several threads may send at once, each to a rank of its own: every rank has its own counters.

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
        """By each destination that has been sent a message."""
        sent_to = list(self.to.items())
        return Counter({dst: sent.num_bytes for dst, sent in sent_to if sent.messages})


class Transport(ABC):
    """One rank's way to move bytes; ``Comm`` checks the arguments, times and explains.

    Tensors come dense, contiguous and detached, of any shape and dtype; a peer is another rank.

    Attributes:
        sent: counted as it leaves. A message is one send, or one chunk that a collective moves
            through a channel by itself, however many segments.
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
        """Returns when ``tensor`` may be overwritten by what is queued behind it."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive into ``tensor``."""

    @abstractmethod
    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        """Both at once: neither waits for the other. They share no memory."""

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

    def channel_to(self, dst: int):
        """The slots in which ``dst`` reads what this rank writes: ``shared_memory.Channel``."""
        raise NotImplementedError(f"the ranks of a {type(self).__name__} share no memory")

    def channel_from(self, src: int):
        """The slots that rank ``src`` writes and this rank reads."""
        raise NotImplementedError(f"the ranks of a {type(self).__name__} share no memory")

    @abstractmethod
    def set_timeout(self, timeout_s: float) -> None:
        """The longest wait for a message from here on."""

    @abstractmethod
    def abandon(self) -> None:
        """Let what still waits, in any thread, end with an error."""

    @abstractmethod
    def close(self) -> None:
        """The end of a run: what was sent has been received, and needs nothing of this rank."""


class TorchTransport(Transport):
    """Point-to-point over ``torch.distributed``: gloo or NCCL, on any number of machines.

    Tensors travel as bytes, so that every dtype can. On gloo, CUDA tensors are staged through host
    memory, because gloo's point-to-point moves host memory only.

    Args:
        backend: of the group, ``gloo`` or ``nccl``.
        device: where this rank's tensors live.
        group: the process group; None is the default one.
    """

    def __init__(self, backend: str, device: torch.device, group=None):
        super().__init__()
        self.device = device
        self.staged = backend == "gloo" and device.type == "cuda"
        self.receives_from_any = self.staged or device.type == "cpu"
        self._group = dist.group.WORLD if group is None else group
        # What each wait is given: nothing, for the group's own timeout.
        self._patience: tuple[timedelta, ...] = ()

    def send(self, tensor: Tensor, dst: int) -> None:
        outgoing = self._outgoing(tensor)
        with _loss_of_a_peer():
            self._group.send([outgoing], dst, 0).wait(*self._patience)
        self.sent.to[dst].count(outgoing.nbytes)

    def recv(self, tensor: Tensor, src: int) -> None:
        with self._landing(tensor) as landing:
            self._group.recv([landing], src, 0).wait(*self._patience)

    def recv_any(self, tensor: Tensor) -> int:
        with self._landing(tensor) as landing:
            work = self._group.recv_anysource([landing], 0)
            work.wait(*self._patience)
        return work._source_rank()

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        outgoing = self._outgoing(send)
        with self._landing(recv) as landing:
            if landing.device.type == "cuda":
                # NCCL matches the two only when they are issued as one group.
                ends = [
                    dist.P2POp(dist.isend, outgoing, dst),
                    dist.P2POp(dist.irecv, landing, src),
                ]
                works = dist.batch_isend_irecv(ends)
            else:
                works = [
                    self._group.send([outgoing], dst, 0),
                    self._group.recv([landing], src, 0),
                ]
            for work in works:
                work.wait(*self._patience)
        self.sent.to[dst].count(outgoing.nbytes)

    def barrier(self) -> None:
        with _loss_of_a_peer():
            if self.device.type == "cuda" and not self.staged:
                dist.barrier(device_ids=[self.device.index])
            else:
                self._group.barrier().wait()

    def set_timeout(self, timeout_s: float) -> None:
        # On NCCL a wait with a limit would block the host: there the group's own timeout holds.
        if self.device.type == "cpu" or self.staged:
            self._patience = (timedelta(seconds=timeout_s),)

    def abandon(self) -> None:
        """Nothing: what waits ends with the group's timeout, or when a peer's process ends."""

    def close(self) -> None:
        """Nothing: the group belongs to who made it."""

    def _outgoing(self, tensor: Tensor) -> Tensor:
        tensor = as_bytes(tensor)
        return tensor.cpu() if self.staged else tensor

    @contextmanager
    def _landing(self, tensor: Tensor) -> Iterator[Tensor]:
        """Where the bytes of ``tensor`` can arrive."""
        tensor = as_bytes(tensor)
        landing = torch.empty_like(tensor, device="cpu") if self.staged else tensor
        with _loss_of_a_peer():
            yield landing
        if self.staged:
            tensor.copy_(landing)


@contextmanager
def _loss_of_a_peer() -> Iterator[None]:
    """PyTorch reports a lost peer as a RuntimeError: its first line, since a C++ stack follows."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip() or type(error).__name__
        raise PeerLostError(text.splitlines()[0]) from error


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes [n], whatever its dtype."""
    return tensor.reshape(-1).view(torch.uint8)
