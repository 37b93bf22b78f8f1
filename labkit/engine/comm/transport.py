"""The interface of all transports, which move and count the bytes for ``Comm``; and their tensors.

What may be sent and received is checked here, and in which memory it travels.
"""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
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
        carry: waits as long as messages take on an emulated link; None without one.

    Raises (every operation): PeerLostError if the peer has ended, or the timeout has passed.
    """

    shares_memory = False
    carry: Any = None

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

    def arrived(self, tensor: Tensor, sources: Sequence[int]) -> Mapping[int, float]:
        """Return the sources whose next message has come or never will, and since when, in s.

        They are like ``tensor``. The first call begins to receive them, ``recv`` then takes one.
        """
        raise ValueError("between machines, recv_any needs gloo")

    # With ``shares_memory``: the slots of an edge, for its sender and its receiver; the windows;
    # a function that maps one block of memory per rank.
    channel_to: Any = None
    channel_from: Any = None
    windows: Any = None
    share: Any = None

    def set_timeout(self, timeout_s: float) -> None:  # noqa: B027
        """Set the longest wait of operations from now on, where waits have a limit."""

    def abandon(self) -> None:  # noqa: B027
        """End every operation that still waits, in any thread, with an error, if possible."""

    def close(self) -> None:  # noqa: B027
        """Close at the end of a run, when every message that was sent has been received."""


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor of any dtype as its bytes: uint8 [n]."""
    # A contiguous tensor of at most one element may have any stride, which a view does not take.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def describe(tensor: Tensor) -> str:
    """Name what both ends of a message must agree on, for example ``float32 [3, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_tensor(tensor: Tensor, device: torch.device | None = None) -> None:
    """Raise ValueError unless ``tensor`` is dense, and on a device of this type."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a tensor is needed, got {type(tensor).__name__}: {tensor!r:.60}")
    if tensor.layout != torch.strided:
        raise ValueError(f"a dense tensor is needed, got {tensor.layout}: use .to_dense()")
    if device is not None and tensor.device.type != device.type:
        raise ValueError(
            f"the ranks of this run work on {device.type}, but the tensor is on "
            f"{tensor.device}: move it with .to(comm.device)"
        )


def check_writable(tensor: Tensor) -> None:
    """Raise ValueError for an expanded tensor: its elements cannot take different values."""
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape)):
        raise ValueError(
            "cannot write into an expanded tensor: its elements share memory. "
            "Use a new tensor (.clone() or torch.empty)"
        )


def to_send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor that is sent for ``tensor``: detached and contiguous."""
    check_tensor(tensor, device)
    # A conjugate or negative view is only a flag: the bytes in memory are not its values.
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def to_receive(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the memory that receives for ``tensor``: itself if contiguous, or a buffer."""
    check_tensor(tensor, device)
    flat = tensor.detach()
    if flat.is_contiguous() and not flat.is_conj() and not flat.is_neg():
        return flat
    check_writable(flat)
    return torch.empty(flat.shape, dtype=flat.dtype, device=flat.device)


def deliver(landing: Tensor, tensor: Tensor) -> Tensor:
    """Copy ``landing`` into ``tensor``, unless it is the same memory; return ``tensor``."""
    if landing.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(landing)
    return tensor


def overlap(a: Tensor, b: Tensor) -> bool:
    """Tell whether two contiguous tensors share a byte; others travel in separate buffers."""
    for tensor in (a, b):
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not is_dense or not tensor.is_contiguous():
            return False
    start = max(a.data_ptr(), b.data_ptr())
    end = min(a.data_ptr() + a.nbytes, b.data_ptr() + b.nbytes)
    return start < end


def check_apart(written: Mapping[str, Tensor], read: Mapping[str, Tensor] | None = None) -> None:
    """Raise ValueError, with the names, if a tensor that is written shares memory with another."""
    named_tensors = [*written.items(), *(read or {}).items()]
    for (name, tensor), (other_name, other) in combinations(named_tensors, 2):
        if name in written and overlap(tensor, other):
            raise ValueError(
                f"{name} and {other_name} share memory, and one would be overwritten before it is "
                "sent: use separate memory for each, for example with .clone()"
            )
