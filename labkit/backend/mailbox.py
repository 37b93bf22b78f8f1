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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from labkit.collectives.common import check_fits
from labkit.comm.comm import Comm
from labkit.comm.source_lines import credit_to
from labkit.comm.work import Work, WorkQueue
from labkit.errors import PeerLostError

_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
# Tag, dtype, number of dimensions, sizes.
_MOST_DIMENSIONS = 13
_ENVELOPE_LENGTH = 3 + _MOST_DIMENSIONS


@dataclass(eq=False)
class _Receive:
    """A posted receive, and the sources from which a message may still fill it."""

    tensor: Tensor
    tag: int
    sources: set[int]
    work: Work


class Mailbox:
    """The messages of one rank of a process group; a receive waits for up to ``timeout_s``.

    ``queue("to", dst)`` and ``queue("from", src)`` return the queue of an edge.
    """

    def __init__(self, others: set[int], queue: Callable[[str, int], WorkQueue], timeout_s: float):
        self.others, self.timeout_s, self._queue = others, timeout_s, queue
        self._lock = threading.Lock()
        self._posted: list[_Receive] = []
        self._unexpected: list[tuple[int, int, Tensor]] = []
        self._broken: dict[int, BaseException] = {}

    def send(self, tensor: Tensor, dst: int, tag: int) -> Work:
        envelope = _envelope(tensor, tag)

        def send(comm: Comm) -> None:
            comm.send(envelope, dst)
            comm.send(tensor, dst)

        return self._queue("to", dst).add("send", send, [tensor], [tensor])

    def recv(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        """Post a receive from ``src``; None accepts the first message of any rank."""
        name = "recv" if src is not None else "recvAnySource"
        # The queue that reads the edge reaches its timeout first, and names the missing rank.
        work = Work(name, [tensor], [tensor], self.timeout_s + 2)
        receive = _Receive(tensor, tag, set(self.others) if src is None else {src}, work)
        with self._lock:
            fitting = (m for m in self._unexpected if m[0] in receive.sources and m[1] == tag)
            if message := next(fitting, None):
                self._unexpected = [m for m in self._unexpected if m is not message]
            else:
                self._posted.append(receive)
        if message:
            self._fill(receive, message[0], message[2])
            return work
        for source in list(receive.sources):
            read = partial(self._read, src=source, receive=receive)
            self._queue("from", source).add("", read, [], [])
        return work

    # These run in the thread of an edge's queue

    def _read(self, comm: Comm, src: int, receive: _Receive) -> None:
        """Read the edge from ``src`` until ``receive`` is filled, from there or elsewhere."""
        while receive in self._posted:
            taken = None
            try:
                if src in self._broken:
                    raise self._broken[src]
                envelope = comm.recv(torch.empty(_ENVELOPE_LENGTH, dtype=torch.int64), src)
                tag, dtype, num_dimensions, *sizes = envelope.tolist()
                with self._lock:
                    taken = self._first_posted(src, tag)
                if taken is None:
                    tensor = torch.empty(sizes[:num_dimensions], dtype=_DTYPES[dtype])
                    self._keep(src, tag, comm.recv(tensor, src))
                else:
                    credit_to(taken.work.location)
                    comm.recv(taken.tensor, src)
                    _end(taken, src)
            except BaseException as error:
                failed = [one for one in (taken, self._without(src, receive)) if one is not None]
                for one in failed:
                    _end(one, src, error)
                if not failed and isinstance(error, PeerLostError):
                    return
                # Nobody knows where the next message on this edge begins.
                self._broken.setdefault(src, error)
                raise

    def _keep(self, src: int, tag: int, tensor: Tensor) -> None:
        """Keep an unexpected message, unless a receive has been posted meanwhile."""
        with self._lock:
            receive = self._first_posted(src, tag)
            if receive is None:
                self._unexpected.append((src, tag, tensor))
        if receive is not None:
            self._fill(receive, src, tensor)

    def _first_posted(self, src: int, tag: int) -> _Receive | None:
        """The first receive that such a message fills, which is then posted no longer."""
        for receive in self._posted:
            if receive.tag == tag and src in receive.sources:
                self._posted.remove(receive)
                return receive
        return None

    def _without(self, src: int, receive: _Receive) -> _Receive | None:
        """Expect nothing from ``src``; returns the receive if no other source can fill it."""
        with self._lock:
            receive.sources.discard(src)
            if receive.sources or receive not in self._posted:
                return None
            self._posted.remove(receive)
            return receive

    def _fill(self, receive: _Receive, src: int, tensor: Tensor) -> None:
        error = None
        try:
            check_fits(tensor, receive.tensor, f"the message from rank {src}")
            receive.tensor.detach().copy_(tensor)
        except ValueError as raised:
            error = raised
        _end(receive, src, error)


def _end(receive: _Receive, src: int, error: BaseException | None = None) -> None:
    receive.work.source = src
    receive.work.finish(error)
    if receive.work.has_futures:
        # Its callbacks may wait for a message of the edge that this thread reads.
        threading.Thread(target=receive.work.complete_futures, daemon=True).start()


def _envelope(tensor: Tensor, tag: int) -> Tensor:
    if tag < 0 or tensor.dim() > _MOST_DIMENSIONS:
        raise ValueError(
            f"a tag is 0 or more, got {tag}; a message has {_MOST_DIMENSIONS} dimensions at most, "
            f"got {tensor.dim()}: use .reshape() at both ends"
        )
    sizes = [*tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.dim())]
    return torch.tensor([tag, _DTYPES.index(tensor.dtype), tensor.dim(), *sizes])
