"""Point-to-point messages over ``torch.distributed``: gloo or NCCL, on any number of machines.

gloo can neither interrupt a wait nor notice that a peer's machine is gone: without an answer it
waits until its timeout. The system can do both. A connection that is shut down lets every wait on
it raise, and with keep-alive an idle peer is asked for a sign of life: its kernel answers as long
as it runs and can be reached, however busy its processes are. Source: tcp(7).
"""

import contextlib
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from labkit.engine.comm.transport import Transport, as_bytes, describe
from labkit.engine.errors import PeerLostError

# The wait at the end for a posted receive whose message never comes.
_PATIENCE_S = 1.0
# After 3 s without a byte a question each second; three without an answer end the connection. So
# does anything sent that is not acknowledged in 6 s.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 6000}

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
        self._queues = backend == "nccl"
        self._patience: tuple[timedelta, ...] = ()
        self._group = group or dist.distributed_c10d._get_default_group()

    def send(self, tensor: Tensor, dst: int) -> None:
        with self.sending(tensor, dst):
            pass

    @contextmanager
    def sending(self, tensor: Tensor, dst: int) -> Iterator[None]:
        """Send ``tensor`` while the block runs."""
        outgoing = self._outgoing(tensor)
        with loss_of_a_peer():
            work = self._group.send([outgoing], dst, self._tag(tensor))
            yield
            work.wait(*self._patience)
        self.sent.to[dst].count(outgoing.nbytes)

    def recv(self, tensor: Tensor, src: int) -> None:
        with self.receiving(tensor, src):
            pass

    @contextmanager
    def receiving(self, tensor: Tensor, src: int) -> Iterator[None]:
        """Receive into ``tensor`` while the block runs."""
        tag = self._tag(tensor)
        with self._landing(tensor) as landing:
            if posted := _posted.pop((self._group, src, tag), None):
                yield
                landing.copy_(posted.take())
            else:
                work = self._group.recv([landing], src, tag)
                yield
                work.wait(*self._patience)

    def arrived(self, tensor: Tensor, sources: Sequence[int]) -> Mapping[int, float]:
        if self._queues:
            return super().arrived(tensor, sources)
        tag = self._tag(tensor)
        arrived_s = {}
        for source in sources:
            key = self._group, source, tag
            if key not in _posted:
                _posted[key] = _PostedReceive(self._group, tensor.nbytes, source, tag)
            if not _posted[key].is_alive():
                arrived_s[source] = _posted[key].arrived_s
        return arrived_s

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        if not self._queues:
            with self.exchanging(send, dst, recv, src):
                return
        # NCCL matches the two ends only when they are issued as a group.
        outgoing = self._outgoing(send)
        with self._landing(recv) as landing:
            ends = [dist.P2POp(dist.isend, outgoing, dst), dist.P2POp(dist.irecv, landing, src)]
            for work in dist.batch_isend_irecv(ends):
                work.wait()
        self.sent.to[dst].count(outgoing.nbytes)

    @contextmanager
    def exchanging(self, send: Tensor, dst: int, recv: Tensor, src: int) -> Iterator[None]:
        if self._queues:
            self.exchange(send, dst, recv, src)
            yield
            return
        # The receive first: gloo tells a peer that it may send on the same connection as the data,
        # behind a message to that peer, so the two directions would take turns.
        with self.receiving(recv, src), self.sending(send, dst):
            yield

    def _tag(self, tensor: Tensor) -> int:
        """Return the tag of a message: equal at both ends if they fit. NCCL has no tags."""
        if self._queues:
            return 0
        contents = f"{describe(tensor)} {self.sent.collective}"
        # Positive, in 31 bits. PyTorch's own messages have the tag 0.
        return zlib.crc32(contents.encode()) % (2**31 - 1) + 1

    def barrier(self) -> None:
        with loss_of_a_peer():
            if self._queues:
                dist.barrier(device_ids=[self.device.index])
            else:
                self._group.barrier().wait()

    def set_timeout(self, timeout_s: float) -> None:
        # With NCCL a wait with a limit would block the host: there the group's own timeout holds.
        if not self._queues:
            self._patience = (timedelta(seconds=timeout_s),)

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


class _PostedReceive(threading.Thread):
    """A receive posted ahead of ``recv``; gloo cannot take it back, so it may outlive a run."""

    def __init__(self, group: Any, num_bytes: int, source: int, tag: int):
        super().__init__(name=f"labkit-from-{source}", daemon=True)
        self._group = group
        self._source = source
        self._tag = tag
        self._landing = torch.empty(num_bytes, dtype=torch.uint8)
        self._error: Exception | None = None
        self.arrived_s = 0.0
        self.start()

    def run(self) -> None:
        try:
            with loss_of_a_peer():
                self._group.recv([self._landing], self._source, self._tag).wait()
        except Exception as error:
            self._error = error
        self.arrived_s = time.perf_counter()

    def take(self) -> Tensor:
        """Return the message when it is there, or raise why it is not."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._landing


# By process group, source and tag.
_posted: dict[tuple[Any, int, int], _PostedReceive] = {}


def close_arrivals() -> None:
    """Wait a moment for all posted receives, before their process groups are destroyed."""
    while _posted:
        _, receive = _posted.popitem()
        # Its message may never come.
        receive.join(_PATIENCE_S)


def connections() -> set[Any]:
    """Return this process's TCP connections: (file descriptor, our address, the peer's)."""
    entries = psutil.Process().net_connections("tcp")
    established = [entry for entry in entries if entry.status == "ESTABLISHED"]
    return {(entry.fd, entry.laddr, entry.raddr) for entry in established}


def keep_alive(opened: Iterable[Any]) -> None:
    """Let the system end these connections when a peer's machine does not answer any more."""

    def ask(handle: socket.socket) -> None:
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                handle.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    _for_each(opened, ask)


def cut(opened: Iterable[Any]) -> None:
    """End what the connections bring: whoever waits for a message on one of them gets an error.

    Only that direction: gloo forgets the waits on a message that it could not write.
    """
    _for_each(opened, lambda handle: handle.shutdown(socket.SHUT_RD))


def _for_each(opened: Iterable[Any], act: Callable[[socket.socket], object]) -> None:
    """Call ``act`` on a second handle of each connection that is still open."""
    for descriptor, _, peer in connections().intersection(opened):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as handle:
            # Between the look and the handle, the number may have been given to another file.
            if handle.getpeername()[:2] == tuple(peer):
                act(handle)


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
    """Tell whether PyTorch's error says that a peer has ended, or did not answer in time.

    PyTorch raises RuntimeError for these and for everything else, such as memory that has run out.
    """
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return False
    return isinstance(error, dist.DistNetworkError) or bool(_LOSS.search(repr(error)))


def first_line(error: BaseException) -> str:
    """Return the text of an error without the C++ stack that follows in PyTorch's."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
