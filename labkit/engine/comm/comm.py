"""Comm: the one object through which learner code and strategies talk to other ranks.

The transport moves and counts the bytes (``labkit.engine.comm.transport``); the session posts each
operation on the status board and times it (``labkit.engine.comm.session``).
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

import torch
from torch import Tensor

from labkit.engine.comm.board import RECV_ANY, Board
from labkit.engine.comm.session import Session
from labkit.engine.comm.source_lines import caller_location
from labkit.engine.comm.transport import (
    Transport,
    check_tensor,
    deliver,
    describe,
    overlap,
    to_receive,
    to_send,
)
from labkit.engine.errors import PeerLostError
from labkit.schedules.ring import Hosts, host_of


class Comm:
    """One rank's connection to the other ranks.

    Attributes:
        rank: this rank, 0 .. world_size - 1.
        world_size: P, the number of ranks.
        hosts: the ranks of each host, host by host; one host with all ranks on one machine.
        device: where this rank's tensors live.
        transport: moves the bytes, and counts them.
        session: posts and records the operations; needed only by code that manages runs.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        transport: Transport,
        board: Board | None = None,
        keep_spans: int | None = None,
        hosts: Hosts | None = None,
    ):
        self.rank, self.world_size = rank, world_size
        self.device = device
        self.hosts: Hosts = hosts or (tuple(range(world_size)),)
        self.transport = transport
        near = self.hosts[self.host] if board else ()
        board = board or Board(world_size)
        self.session = Session(rank, device, transport, board, near, keep_spans, self.hosts)
        self._inside_collective = False

    @property
    def host(self) -> int:
        """The number of this rank's host, 0 .. len(hosts) - 1."""
        return host_of(self.rank, self.hosts)

    @property
    def messages(self) -> int:
        """Messages sent so far."""
        return self.transport.sent.messages

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent so far."""
        return self.transport.sent.num_bytes

    @property
    def bytes_to(self) -> Counter[int]:
        """Payload bytes sent so far, by peer."""
        return self.transport.sent.bytes_to

    @property
    def operations(self) -> int:
        """Calls of send, recv, recv_any and exchange so far: the rounds of an algorithm."""
        return self.session.operations

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send ``tensor`` (any shape, dense, any dtype) to rank ``dst``. Counts 1 message.

        Returns when the receive has begun and the tensor may be overwritten; with NCCL when the
        transfer is queued on the current stream.

        Raises:
            ValueError: ``dst`` is not another rank; the tensor is sparse or on another device.
            MismatchError: the receiver expects another shape or dtype.
            PeerLostError: the receiver has ended.
        """
        dst = self._peer(dst, "send to")
        outgoing = to_send(tensor, self.device)
        with self.session.operation("send", sent=(dst, tensor)):
            self.transport.send(outgoing, dst)

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        """Receive into ``tensor`` from rank ``src``; return ``tensor``. Counts no message.

        Raises the errors of ``send``, and ValueError for an expanded tensor.
        """
        src = self._peer(src, "receive from")
        incoming = to_receive(tensor, self.device)
        with self.session.operation("recv", expected=(src, tensor)):
            self.transport.recv(incoming, src)
        return deliver(incoming, tensor)

    def recv_add(self, tensor: Tensor, src: int) -> Tensor:
        """Receive a tensor from rank ``src`` and add it to ``tensor``; return ``tensor``.

        In shared memory each segment is added directly from its slot, while it is in the cache.
        Raises the errors of ``recv``, and ValueError for a tensor that is not contiguous.
        """
        check_tensor(tensor, self.device)
        if not tensor.is_contiguous():
            raise ValueError("recv_add needs a contiguous tensor: receive and add in two steps")
        src = self._peer(src, "receive from")
        with self.session.operation("recv", expected=(src, tensor)):
            self.transport.recv_add(tensor.detach(), src)
        return tensor

    def recv_any(self, tensor: Tensor, sources: Iterable[int]) -> int:
        """Receive into ``tensor`` from the first of ``sources`` to send; return that rank.

        If several sources wait, the one that has waited longest is served first, so none starves.
        After the error for a source that has ended, leave that source out. Counts no message. From
        another host a send may end as soon as any ``recv_any`` has named its rank.

        Raises:
            ValueError: as for ``recv``, or ``sources`` is empty, or on another host without gloo.
            MismatchError: the sender sends another shape or dtype.
            PeerLostError: a source has ended (the error's ``rank``).
        """
        session = self.session
        session.check_open()
        distinct = list(dict.fromkeys(sources))
        if not distinct:
            raise ValueError(f"rank {self.rank} cannot receive: the list of sources is empty")
        for source in distinct:
            self._peer(source, "receive from")
        incoming = to_receive(tensor, self.device)
        start = session.recorder.timer.mark()
        session.board.enter_any(self.rank, distinct, caller_location())
        try:
            src = session.first_sender(incoming, distinct)
            with session.operation(RECV_ANY, expected=(src, tensor), start=start):
                self.transport.recv(incoming, src)
        except PeerLostError:
            session.board.leave(self.rank)
            raise
        deliver(incoming, tensor)
        return src

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> Tensor:
        """Send ``send`` to ``dst`` while receiving ``recv`` from ``src``; return ``recv``.

        All ranks of a ring may call it at the same time without a deadlock. Counts 1 message.
        Raises the errors of ``recv``, and ValueError if the two tensors share memory.
        """
        outgoing = to_send(send, self.device)
        incoming = to_receive(recv, self.device)
        if overlap(send, recv):
            raise ValueError(
                f"rank {self.rank} cannot exchange {describe(send)} for {describe(recv)}, which "
                "share memory: the incoming values would overwrite values that are not sent yet. "
                "Receive into a new tensor (torch.empty_like), or send a copy (.clone())"
            )
        dst = self._peer(dst, "send to")
        src = self._peer(src, "receive from")
        with self.session.operation("exchange", sent=(dst, send), expected=(src, recv)):
            self.transport.exchange(outgoing, dst, incoming, src)
        return deliver(incoming, recv)

    def barrier(self) -> None:
        """Wait until every rank has called this. Counts no message."""
        with self.collective("barrier"):
            self.session.barrier()

    @contextmanager
    def collective(
        self, name: str, tensor: Tensor | None = None, option: str = ""
    ) -> Iterator[None]:
        """Announce a collective, which all ranks must call in the same order with equal shapes.

        A collective inside another one (such as the two halves of the ring) is not announced.

        Args:
            name: the operation.
            tensor: the tensor it works on; None if shapes may differ between ranks.
            option: anything else that must be equal on all ranks: the reduction or the root.

        Raises:
            MismatchError: another rank has called another collective; shows both sequences.
            PeerLostError: a rank has ended.
        """
        self.session.check_open()
        if self._inside_collective:
            yield
            return
        description = name
        if tensor is not None:
            check_tensor(tensor, self.device)
            description += f" {describe(tensor)}"
        if option:
            description += f" {option}"
        self.session.announce(description)
        self._inside_collective = True
        self.transport.sent.collective = description
        try:
            yield
        finally:
            self._inside_collective = False
            self.transport.sent.collective = ""

    def span(self, kind: str, device: torch.device | None = None) -> AbstractContextManager[None]:
        """Record a region: ``compute``, ``update``, ``data`` or the name of a collective's phase.

        Transfers inside a region of local work are recorded as ``communicate``; transfers inside a
        phase are recorded under its name.

        ``device`` is where it works, if not on ``comm.device``: on a GPU a span lasts from one
        CUDA event on that GPU's current stream to another.
        """
        timer = None if device is None else self.session.timer_of(device)
        return self.session.recorder.region(kind, timer)

    def progress(
        self,
        done: int,
        total: int = 0,
        label: str = "",
        *,
        samples: int = 0,
        loss: Tensor | float | None = None,
    ) -> None:
        """Report this rank's progress, which the notebook shows while the run lasts.

        ``done`` of ``total`` steps (0: not known), ``label`` says what is counted, ``samples`` are
        those since the last report. A ``loss`` leaves a GPU at most four times a second.
        """
        self.session.board.progress(self.rank, done, total, label, samples)
        if loss is not None:
            self.session.report_loss(loss)

    def _peer(self, peer: int, verb: str) -> int:
        """Return the rank of ``peer`` in the run; ValueError if it is not another rank."""
        if isinstance(peer, bool) or not isinstance(peer, int):
            raise ValueError(f"rank {self.rank} cannot {verb} {peer!r}: a rank is an integer")
        if not 0 <= peer < self.world_size:
            raise ValueError(
                f"rank {self.rank} cannot {verb} rank {peer}: with world size {self.world_size} "
                f"the ranks are 0 to {self.world_size - 1} (a ring wraps with % world_size, "
                "a chain has ends)"
            )
        if peer == self.rank:
            raise ValueError(f"rank {self.rank} cannot {verb} itself: that needs no message")
        return peer

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a comm belongs to its rank and its run, and cannot be sent to another process or "
            "returned: return tensors or numbers instead"
        )

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, world_size={self.world_size}, device={self.device})"


@contextmanager
def exchange_under_way(
    comm: Comm, send: Tensor, dst: int, recv: Tensor, src: int
) -> Iterator[None]:
    """``comm.exchange`` that goes on while the block runs, and has ended after it.

    The block may use ``comm`` with other ranks. Where messages do not move by themselves (in
    shared memory, on NCCL) the exchange comes before the block. Its span is what comes after.
    The tensors are contiguous, without common memory, and not to be touched in the block.
    """
    with (
        comm.session.operation("exchange", sent=(dst, send), expected=(src, recv)) as again,
        comm.transport.exchanging(send, dst, recv, src),
    ):
        moved_s = time.monotonic()
        yield
        again(moved_s)


class SubComm(Comm):
    """A ``Comm`` of some ranks: the messages of ``comm``, its counters and its trace.

    Its collectives consist of messages, and are not announced, since the other ranks do not call
    them: announce a collective of all ranks around them.

    Args:
        comm: this rank's Comm.
        ranks: those that take part, this one among them; rank n here is ``ranks[n]`` there. Its
            own may be a ``SubComm`` again.
        phase: the kind of the spans of a ring's messages; None leaves it to the collective.
    """

    def __init__(self, comm: Comm, ranks: Sequence[int], phase: str | None = None):
        self.rank, self.world_size = ranks.index(comm.rank), len(ranks)
        self.device = comm.device
        self.hosts = (tuple(range(self.world_size)),)
        self.transport = comm.transport
        self.session = comm.session
        self._comm = comm
        self._ranks = ranks
        self._phase = phase

    def _peer(self, peer: int, verb: str) -> int:
        peer = super()._peer(peer, verb)
        return self._comm._peer(self._ranks[peer], verb)

    def recv_any(self, tensor: Tensor, sources: Iterable[int]) -> int:
        raise NotImplementedError("recv_any is for all ranks")

    def barrier(self) -> None:
        raise NotImplementedError("a barrier is for all ranks")

    @contextmanager
    def collective(
        self, name: str, tensor: Tensor | None = None, option: str = ""
    ) -> Iterator[None]:
        self.session.check_open()
        yield

    def span(self, kind: str, device: torch.device | None = None) -> AbstractContextManager[None]:
        if self._phase is not None and kind in ("share_reduce", "share_only"):
            kind = self._phase
        return self._comm.span(kind, device)
