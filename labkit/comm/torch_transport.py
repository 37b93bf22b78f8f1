"""Point-to-point messages over ``torch.distributed``: gloo or NCCL, on any number of machines."""

import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.comm.tensors import name_of
from labkit.comm.transport import Transport, as_bytes
from labkit.errors import PeerLostError
from labkit.tracing import ClockTimer

# For a posted receive whose message never comes.
_PATIENCE_S = 1.0

# gloo names its source file in each error of a connection. NCCL names its error: of a connection,
# of a process that has ended, or of a group that was aborted because of them.
_LOSS = re.compile(
    r"gloo/transport/|ncclRemoteError|ncclSystemError|remote process|communicator was aborted"
    r"|operation timed ?out|operation timeout|timed out in blocking wait"
    r"|Operation timed out after",
    re.IGNORECASE,
)


class TorchTransport(Transport):
    """Point-to-point through a process group.

    Tensors are sent as bytes, so that every dtype works. With gloo, CUDA tensors are staged
    through host memory, because gloo's point-to-point moves host memory only.

    Over gloo a message has a tag made of its shape, its dtype and its collective, and meets only a
    receive with the same tag: two ends that do not fit both wait. (Without tags gloo aborts one of
    the processes, or delivers other values.) NCCL has no tags, and only queues: its operations
    are carried out first in, first out.

    Args:
        backend: of the group, ``gloo`` or ``nccl``.
        device: where this rank's tensors live.
        group: the ``dist.ProcessGroup``, or one of its backends; None is the default group.
    """

    def __init__(self, backend: str, device: torch.device, group: Any = None):
        super().__init__()
        self.device = device
        self.staged = backend == "gloo" and device.type == "cuda"
        self.receives_from_any = self.staged or device.type == "cpu"
        self._queues = backend == "nccl"
        self._group = group or dist.distributed_c10d._get_default_group()
        known = _arrivals.get(id(self._group))
        is_known = known is not None and known.group is self._group
        self._arrivals = known if is_known and known else _Arrivals(self._group)
        # The argument of each wait; empty for the group's own timeout.
        self._patience: tuple[timedelta, ...] = ()

    def send(self, tensor: Tensor, dst: int) -> None:
        with self.sending(tensor, dst):
            pass

    @contextmanager
    def sending(self, tensor: Tensor, dst: int) -> Iterator[None]:
        """Send ``tensor`` while the block runs."""
        outgoing = self._outgoing(tensor)
        with loss_of_a_peer():
            works = [self._group.send([outgoing], dst, self._tag(tensor))]
            yield
            self._end(works)
        self.sent.to[dst].count(outgoing.nbytes)

    def recv(self, tensor: Tensor, src: int) -> None:
        with self.receiving(tensor, src):
            pass

    @contextmanager
    def receiving(self, tensor: Tensor, src: int) -> Iterator[None]:
        """Receive into ``tensor`` while the block runs."""
        tag = self._tag(tensor)
        with self._landing(tensor) as landing:
            if (src, tag) in self._arrivals.posted:
                yield
                landing.copy_(self._arrivals.take(src, tag))
            else:
                works = [self._group.recv([landing], src, tag)]
                yield
                self._end(works)

    def expect(self, tensor: Tensor, sources: Sequence[int], ring: Callable[[], None]) -> None:
        _arrivals[id(self._group)] = self._arrivals
        tag = self._tag(tensor)
        for source in sources:
            if (source, tag) not in self._arrivals.posted:
                self._arrivals.post(tensor.nbytes, source, tag, ring)

    def arrived(self, tensor: Tensor, sources: Sequence[int]) -> Mapping[int, float]:
        tag = self._tag(tensor)
        found = {source: self._arrivals.posted.get((source, tag)) for source in sources}
        return {source: one.at_s for source, one in found.items() if one and one.ended.is_set()}

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        if self._queues:
            self._exchange_as_one(send, dst, recv, src)
            return
        with self.exchanging(send, dst, recv, src):
            pass

    @contextmanager
    def exchanging(self, send: Tensor, dst: int, recv: Tensor, src: int) -> Iterator[None]:
        if self._queues:
            with super().exchanging(send, dst, recv, src):
                yield
            return
        # The receive first: gloo tells a peer that it may send on the same connection as the data,
        # behind a message to that peer, so the two directions would take turns.
        with self.receiving(recv, src), self.sending(send, dst):
            yield

    def _exchange_as_one(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        """Exchange over NCCL, which matches the two ends only when they are issued as a group."""
        outgoing = self._outgoing(send)
        with self._landing(recv) as landing:
            ends = [
                dist.P2POp(dist.isend, outgoing, dst),
                dist.P2POp(dist.irecv, landing, src),
            ]
            self._end(dist.batch_isend_irecv(ends))
        self.sent.to[dst].count(outgoing.nbytes)

    def _tag(self, tensor: Tensor) -> int:
        """Of a message: equal at both ends if they fit. NCCL has no tags."""
        if self._queues:
            return 0
        return _tag_of(tensor.dtype, tensor.shape, self.collective)

    def _end(self, works: list[Any]) -> None:
        """Wait for operations; if they are queued, let the current stream wait for them."""
        for work in works:
            work.wait(*self._patience)

    def barrier(self) -> None:
        with loss_of_a_peer():
            if self.device.type == "cuda" and not self.staged:
                dist.barrier(device_ids=[self.device.index])
            else:
                self._group.barrier().wait()

    def set_timeout(self, timeout_s: float) -> None:
        # With NCCL a wait with a limit would block the host: there the group's own timeout holds.
        if self.device.type == "cpu" or self.staged:
            self._patience = (timedelta(seconds=timeout_s),)

    def abandon(self) -> None:
        """Do nothing: a wait ends at the group's timeout, or when the peer's process ends."""

    def close(self) -> None:
        """Do nothing: the group belongs to the code that created it."""

    def _outgoing(self, tensor: Tensor) -> Tensor:
        tensor = as_bytes(tensor)
        return tensor.cpu() if self.staged else tensor

    @contextmanager
    def _landing(self, tensor: Tensor) -> Iterator[Tensor]:
        """Lend the memory that receives the bytes of ``tensor``: on the host if it is staged."""
        tensor = as_bytes(tensor)
        landing = torch.empty_like(tensor, device="cpu") if self.staged else tensor
        with loss_of_a_peer():
            yield landing
        if self.staged:
            tensor.copy_(landing)


@dataclass
class _Arrival:
    """A receive that is posted before ``recv`` asks for it: where it lands, and how it ended."""

    landing: Tensor
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    at_s: float = 0.0


class _Arrivals:
    """The posted receives of one process group, by source and tag; each waits in a thread.

    gloo cannot take back a posted receive. So they belong to the group, and outlive a run.
    """

    def __init__(self, group: Any):
        self.group = group
        self.posted: dict[tuple[int, int], _Arrival] = {}
        self.threads: list[threading.Thread] = []

    def post(self, num_bytes: int, source: int, tag: int, ring: Callable[[], None]) -> None:
        arrival = self.posted[source, tag] = _Arrival(torch.empty(num_bytes, dtype=torch.uint8))

        def receive() -> None:
            try:
                with loss_of_a_peer():
                    self.group.recv([arrival.landing], source, tag).wait()
            except Exception as error:
                arrival.error = error
            arrival.at_s = ClockTimer().mark()
            arrival.ended.set()
            ring()

        thread = threading.Thread(target=receive, name=f"labkit-from-{source}", daemon=True)
        thread.start()
        self.threads = [*(one for one in self.threads if one.is_alive()), thread]

    def take(self, source: int, tag: int) -> Tensor:
        """The message of ``source``; waits until it is there, and raises why it is not."""
        self.posted[source, tag].ended.wait()
        arrival = self.posted.pop((source, tag))
        if arrival.error is not None:
            raise arrival.error
        return arrival.landing


# By the id of a process group; only of groups with a posted receive.
_arrivals: dict[int, _Arrivals] = {}


def close_arrivals() -> None:
    """Wait a moment for all posted receives, before their process groups are destroyed."""
    while _arrivals:
        _, arrivals = _arrivals.popitem()
        for thread in arrivals.threads:
            # Its message may never come.
            thread.join(_PATIENCE_S)


@lru_cache(maxsize=1024)
def _tag_of(dtype: torch.dtype, shape: torch.Size, collective: str) -> int:
    name = f"{name_of(dtype, shape)} {collective}".encode()
    # Positive, in 31 bits. PyTorch's own messages have the tag 0.
    return zlib.crc32(name) % (2**31 - 1) + 1


@contextmanager
def loss_of_a_peer() -> Iterator[None]:
    """Turn an error that means a lost peer into a PeerLostError; leave every other as it is."""
    try:
        yield
    except RuntimeError as error:
        if not means_loss(error):
            raise
        raise PeerLostError(first_line(error)) from error


def means_loss(error: BaseException) -> bool:
    """Whether PyTorch's error says that a peer has ended, or did not answer in time.

    PyTorch raises RuntimeError for these and for everything else, such as memory that has run out.
    """
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return False
    return isinstance(error, dist.DistNetworkError) or bool(_LOSS.search(str(error)))


def first_line(error: BaseException) -> str:
    """The text of an error without the C++ stack that follows in PyTorch's."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
