"""Messages matched by source and tag, on a ``Comm`` whose edges are first in, first out.

Every message travels as an envelope (its tag, dtype and shape) and then its tensor. A receiver
reads only the edges it waits for. A message that arrives before it is asked for is kept as an
*unexpected message*; a receive that is called before its message arrives is a *posted receive*. So
a send ends when the receiver reads that edge, and the receiver reads it only while a posted
receive accepts messages from that edge.

Source: the two queues of MPI implementations, for example Gropp and Lusk, "An abstract device
definition to support the implementation of a high-level point-to-point message-passing interface"
(1994).
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labkit.collectives.common import check_fits
from labkit.comm.comm import Comm
from labkit.comm.source_lines import credit_to
from labkit.comm.work import Work, WorkQueue
from labkit.errors import PeerLostError

_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_MOST_DIMENSIONS = 13
# Tag, dtype, number of dimensions, sizes.
_ENVELOPE_LENGTH = 3 + _MOST_DIMENSIONS
# When the group is destroyed: the longest wait for all posted receives together.
_LAST_PATIENCE_S = 1.0


@dataclass(eq=False)
class _Receive:
    """A posted receive: which messages may fill it, and when it was posted."""

    tensor: Tensor
    tag: int
    sources: set[int]
    work: Work
    posted_s: float = field(default_factory=time.monotonic)
    is_taken: bool = False


class Mailbox:
    """The messages of one rank of a process group; a receive waits for up to ``timeout_s``.

    ``queue("to", dst)`` and ``queue("from", src)`` return the queue of an edge.
    """

    def __init__(
        self, rank: int, size: int, queue: Callable[[str, int], WorkQueue], timeout_s: float
    ):
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._queue = queue
        self._lock = threading.Lock()
        self._posted: list[_Receive] = []
        self._unexpected: list[tuple[int, int, Tensor]] = []
        self._read_from: set[int] = set()
        self._broken: dict[int, BaseException] = {}

    def send(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Queue a message to ``dst``; a message to this rank itself arrives at once."""
        _check_tag(tag)
        envelope = _envelope(tensor, tag)
        if dst == self.rank:
            work = Work("send", [tensor], [tensor], str)
            self._keep(dst, tag, tensor.detach().clone())
            work.finish()
            return work

        def send(comm: Comm) -> None:
            comm.send(envelope, dst)
            comm.send(tensor, dst)

        return self._queue("to", dst).add("send", send, [tensor], [tensor])

    def recv(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        """Post a receive from ``src``; None accepts the first message of any rank."""
        _check_tag(tag)
        sources = set(range(self.size)) if src is None else {src}
        started_s = time.monotonic()
        name = "recv" if src is not None else "recvAnySource"
        work = Work(name, [tensor], [tensor], lambda: self._why_late(started_s))
        receive = _Receive(tensor, tag, sources, work)
        with self._lock:
            self._posted.append(receive)
            message = self._first_unexpected(receive)
            unread = set() if message else sources - self._read_from - {self.rank}
            self._read_from |= unread
        if message:
            self._fill(receive, *message)
        for source in unread:
            self._queue("from", source).add(
                "", lambda comm, source=source: self._read(comm, source), [], []
            )
        return work

    def end(self) -> None:
        """Wait a short time for the posted receives: their messages may be under way."""
        until_s = time.monotonic() + min(_LAST_PATIENCE_S, self.timeout_s)
        for receive in list(self._posted):
            receive.work.done.wait(max(0.0, until_s - time.monotonic()))

    def _why_late(self, started_s: float) -> str:
        took_s = time.monotonic() - started_s
        # The queue that reads this edge reaches its timeout first, and names the missing rank.
        return f"nothing came in {took_s:.1f} s" if took_s > self.timeout_s + 2 else ""

    # These run in the thread of an edge's queue

    def _read(self, comm: Comm, src: int) -> None:
        """Read the edge from ``src`` while a posted receive could be filled from there."""
        while self._is_wanted(src):
            started_s = time.monotonic()
            envelope = torch.empty(_ENVELOPE_LENGTH, dtype=torch.int64)
            try:
                if src in self._broken:
                    raise self._broken[src]
                comm.recv(envelope, src)
                self._read_message(comm, src, envelope.tolist())
            except BaseException as error:
                if self._fail(src, started_s, error) or not isinstance(error, PeerLostError):
                    # Nobody knows where the next message on this edge begins.
                    self._broken.setdefault(src, error)
        if src in self._broken:
            raise self._broken[src]

    def _is_wanted(self, src: int) -> bool:
        with self._lock:
            wanted = any(src in r.sources and not r.is_taken for r in self._posted)
            if not wanted:
                self._read_from.discard(src)
            return wanted

    def _read_message(self, comm: Comm, src: int, envelope: list[int]) -> None:
        tag, dtype, num_dimensions, *sizes = envelope
        with self._lock:
            receive = self._first_posted(src, tag)
        if receive is None:
            tensor = torch.empty(sizes[:num_dimensions], dtype=_DTYPES[dtype])
            self._keep(src, tag, comm.recv(tensor, src))
            return
        credit_to(receive.work.location)
        try:
            comm.recv(receive.tensor, src)
        except BaseException as error:
            self._end(receive, src, error)
            raise
        self._end(receive, src)

    def _keep(self, src: int, tag: int, tensor: Tensor) -> None:
        """Keep an unexpected message, unless a receive has been posted meanwhile."""
        with self._lock:
            receive = self._first_posted(src, tag)
            if receive is None:
                self._unexpected.append((src, tag, tensor))
        if receive is not None:
            self._fill(receive, src, tensor)

    def _fail(self, src: int, started_s: float, error: BaseException) -> bool:
        """End the receives that only ``src`` could fill; returns whether there were any."""
        with self._lock:
            waiting = [r for r in self._posted if src in r.sources and not r.is_taken]
            # A receive that was posted later has not waited for the whole timeout yet.
            waiting = [r for r in waiting if r.posted_s <= started_s]
            for receive in waiting:
                receive.sources.discard(src)
            hopeless = [r for r in waiting if not r.sources - {self.rank}]
        for receive in hopeless:
            self._end(receive, src, error)
        return bool(hopeless)

    # Matching. The first two are called with the lock held.

    def _first_posted(self, src: int, tag: int) -> _Receive | None:
        for receive in self._posted:
            if not receive.is_taken and receive.tag == tag and src in receive.sources:
                receive.is_taken = True
                return receive
        return None

    def _first_unexpected(self, receive: _Receive) -> tuple[int, Tensor] | None:
        for index, (src, tag, tensor) in enumerate(self._unexpected):
            if src in receive.sources and tag == receive.tag:
                del self._unexpected[index]
                receive.is_taken = True
                return src, tensor
        return None

    def _fill(self, receive: _Receive, src: int, tensor: Tensor) -> None:
        error = None
        try:
            check_fits(tensor, receive.tensor, f"the message from rank {src}")
            receive.tensor.detach().copy_(tensor)
        except ValueError as raised:
            error = raised
        self._end(receive, src, error)

    def _end(self, receive: _Receive, src: int, error: BaseException | None = None) -> None:
        receive.work.source = src
        receive.work.finish(error)
        with self._lock:
            self._posted.remove(receive)
        if receive.work.has_futures:
            # Its callbacks may wait for a message of the edge that this thread reads.
            threading.Thread(target=receive.work.complete_futures, daemon=True).start()


def _check_tag(tag: int) -> None:
    if tag < 0:
        raise ValueError(f"a tag is 0 or more, got {tag}: give both ends the same tag")


def _envelope(tensor: Tensor, tag: int) -> Tensor:
    if tensor.dim() > _MOST_DIMENSIONS:
        raise ValueError(
            f"a message has {_MOST_DIMENSIONS} dimensions at most, got {tensor.dim()}: "
            "use .reshape() at both ends"
        )
    sizes = [*tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.dim())]
    return torch.tensor([tag, _DTYPES.index(tensor.dtype), tensor.dim(), *sizes])
