"""Messages matched by source and tag, on a ``Comm`` whose edges are first in, first out.

A message travels as an envelope (its tag, dtype and shape) and then its tensor. A rank reads an
edge only while a *posted receive* accepts messages from it: so long a send waits. What no posted
receive accepts is kept, as an *unexpected message*.

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
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.source_lines import credit_to
from labkit.engine.comm.work import Work, WorkQueue

_all_dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DTYPES = sorted(_all_dtypes, key=str)
# Tag, dtype, number of dimensions, up to 13 sizes.
_ENVELOPE_LENGTH = 16


@dataclass(eq=False)
class _Message:
    src: int
    tag: int
    tensor: Tensor


@dataclass(eq=False)
class _Receive:
    """A posted receive, and the sources from which a message may still fill it."""

    tensor: Tensor
    tag: int
    sources: set[int]
    work: Work

    def accepts(self, message: _Message) -> bool:
        return message.tag == self.tag and message.src in self.sources

    def fill(self, message: _Message) -> None:
        try:
            check_fits(message.tensor, self.tensor, f"the message from rank {message.src}")
            self.tensor.detach().copy_(message.tensor)
            self.end(message.src)
        except ValueError as error:
            self.end(message.src, error)

    def end(self, src: int, error: BaseException | None = None) -> None:
        self.work.source = src
        self.work.finish(error)
        if self.work.incomplete:
            # Its callbacks may wait for a message of the edge that this thread reads.
            threading.Thread(target=self.work.complete_futures, daemon=True).start()


class Mailbox:
    """The messages of one rank of a process group; a receive waits for up to ``timeout_s``.

    ``queue("to", dst)`` and ``queue("from", src)`` return the queue of an edge.
    """

    def __init__(self, peers: set[int], queue: Callable[[str, int], WorkQueue], timeout_s: float):
        self.peers = peers
        self.timeout_s = timeout_s
        self._queue = queue
        self._lock = threading.Lock()
        self._posted: list[_Receive] = []
        self._unexpected: list[_Message] = []
        self._broken: dict[int, BaseException] = {}

    def send(self, tensor: Tensor, dst: int, tag: int) -> Work:
        envelope = torch.zeros(_ENVELOPE_LENGTH, dtype=torch.int64)
        header = [tag, _DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        envelope[: len(header)] = torch.tensor(header)

        def send(comm: Comm) -> None:
            comm.send(envelope, dst)
            comm.send(tensor, dst)

        return self._queue("to", dst).add("send", send, [tensor], [tensor])

    def recv(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        """Post a receive from ``src``; None accepts the first message of any rank."""
        name = "recvAnySource" if src is None else "recv"
        sources = set(self.peers) if src is None else {src}
        # The queue that reads the edge reaches its timeout first, and names the missing rank.
        work = Work(name, [tensor], [tensor], self.timeout_s + 2)
        receive = _Receive(tensor, tag, sources, work)
        with self._lock:
            message = next(filter(receive.accepts, self._unexpected), None)
            if message is None:
                self._posted.append(receive)
            else:
                self._unexpected.remove(message)
        if message is not None:
            receive.fill(message)
            return work
        for source in list(receive.sources):
            self._queue("from", source).add("", partial(self._read, source, receive), [], [])
        return work

    def _read(self, src: int, receive: _Receive, comm: Comm) -> None:
        """Read the edge from ``src`` until ``receive`` is filled, from there or elsewhere."""
        while receive in self._posted:
            matched = None
            try:
                if src in self._broken:
                    raise self._broken[src]
                envelope = comm.recv(torch.empty(_ENVELOPE_LENGTH, dtype=torch.int64), src)
                tag, dtype, dimensions, *sizes = envelope.tolist()
                landing = torch.empty(sizes[:dimensions], dtype=_DTYPES[dtype])
                message = _Message(src, tag, landing)
                matched = self._match(message)
                if matched is not None:
                    credit_to(matched.work.location)
                comm.recv((matched or message).tensor, src)
            except BaseException as error:
                with self._lock:
                    receive.sources.discard(src)
                    if matched is None and receive in self._posted and not receive.sources:
                        matched = receive
                        self._posted.remove(receive)
                if matched is None:
                    # Another source has sent, or still may.
                    return
                # Nobody knows where the next message on this edge begins.
                self._broken.setdefault(src, error)
                matched.end(src, error)
                if matched is receive:
                    raise
                continue
            if matched is not None:
                matched.end(src)
            elif posted_since := self._match(message, keep=True):
                posted_since.fill(message)

    def _match(self, message: _Message, keep: bool = False) -> _Receive | None:
        """Take the first posted receive of such a message; if none, maybe keep the message."""
        with self._lock:
            receive = next((posted for posted in self._posted if posted.accepts(message)), None)
            if receive is not None:
                self._posted.remove(receive)
            elif keep:
                self._unexpected.append(message)
            return receive
