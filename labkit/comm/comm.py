"""Comm: the one object through which learner code and strategies talk to other ranks.

Five operations: send, recv, recv_any, exchange, barrier. How the bytes travel, and counting them,
is the transport's business (``labkit.comm.transport``); posting each operation and timing it is
the session's (``labkit.comm.session``).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

import torch
from torch import Tensor

from labkit.comm.any_source import AnySource
from labkit.comm.board import Board
from labkit.comm.memory_overlap import overlap
from labkit.comm.session import Session
from labkit.comm.tensors import check_tensor, deliver, describe, to_receive, to_send
from labkit.comm.transport import Transport
from labkit.comm.waiting import Doorbells


class Comm:
    """One rank's way to the others.

    Attributes:
        rank: this rank, 0 .. world_size - 1.
        world_size: P, the number of ranks.
        device: where this rank's tensors live.
        transport: moves the bytes, and counts them.
        session: this rank's place in the run, for those who manage runs.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        transport: Transport,
        board: Board | None = None,
        keep_spans: int | None = None,
        doorbells: Doorbells | None = None,
    ):
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.transport = transport
        board = board or Board(world_size)
        self.session = Session(rank, device, transport, board, doorbells, keep_spans)
        self._any_source = AnySource(self.session)
        self._inside_collective = False

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
        """Send ``tensor`` (any shape, dense, any dtype) to rank ``dst``.

        Returns when the receive has begun and the tensor may be overwritten (gloo), or when the
        transfer is queued on the stream (NCCL). Counts 1 message.

        Raises:
            ValueError: ``dst`` is not another rank; the tensor is sparse or on another device.
            MismatchError: the receiver expects another shape or dtype.
            PeerLostError: the receiver has ended.
        """
        outgoing = to_send(tensor, self.device)
        self._check_peer(dst, "send to")
        with self.session.operation("send", sent=(dst, describe(tensor))):
            self.transport.send(outgoing, dst)

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        """Receive into ``tensor`` in place, from rank ``src``; returns it. Counts no message.

        Raises:
            ValueError: ``src`` is not another rank; the tensor is sparse, on another device, or
                expanded (its elements share memory).
            MismatchError: the sender sends another shape or dtype.
            PeerLostError: the sender has ended.
        """
        incoming = to_receive(tensor, self.device)
        self._check_peer(src, "receive from")
        with self.session.operation("recv", expected=(src, describe(tensor))):
            self.transport.recv(incoming, src)
        return deliver(incoming, tensor)

    def recv_add(self, tensor: Tensor, src: int) -> Tensor:
        """Receive from rank ``src`` and add it to ``tensor``, in place; returns it.

        In shared memory, what arrives is added straight out of the slots, segment by segment,
        while it is in the cache; other transports let it land first. Counts no message.

        Raises what ``recv`` raises, and ValueError for a tensor that is not contiguous.
        """
        check_tensor(tensor, self.device)
        if not tensor.is_contiguous():
            raise ValueError("recv_add needs a contiguous tensor: receive and add in two steps")
        self._check_peer(src, "receive from")
        with self.session.operation("recv", expected=(src, describe(tensor))):
            self.transport.recv_add(tensor.detach(), src)
        return tensor

    def recv_any(self, tensor: Tensor, sources: Iterable[int]) -> int:
        """Receive into ``tensor`` in place, from whichever of ``sources`` sends; returns which.

        Of several that wait, the one that has waited longest comes first, so none starves. A
        source that has ended is named by one error; after it, recv_any continues with the others.
        Counts no message. Ranks of several machines have to be on gloo, and no other rank may have
        something to send to this one meanwhile: see ``can_choose``.

        Raises:
            ValueError: as ``recv``; no sources.
            MismatchError: the sender sends another shape or dtype.
            PeerLostError: a source has ended (its ``rank`` says which); or all have.
        """
        self.session.check_open()
        asked = list(dict.fromkeys(sources))
        if not asked:
            raise ValueError(f"rank {self.rank} cannot receive from any of no sources: name one")
        for source in asked:
            self._check_peer(source, "receive from")
        incoming = to_receive(tensor, self.device)
        src = self._any_source.recv(tensor, incoming, asked)
        deliver(incoming, tensor)
        return src

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> Tensor:
        """Send ``send`` to ``dst`` while receiving ``recv`` from ``src``; returns ``recv``.

        The pair that cannot deadlock: every rank of a ring may call it at once. Counts 1 message.
        Raises what ``send`` and ``recv`` raise, and ValueError if the two tensors share memory:
        what arrives would overwrite what has not left yet.
        """
        outgoing, incoming = to_send(send, self.device), to_receive(recv, self.device)
        if overlap(send, recv):
            raise ValueError(
                f"rank {self.rank} cannot exchange {describe(send)} for {describe(recv)}, which "
                "share memory: what arrives would overwrite what has not left yet. Receive into "
                "a new tensor (torch.empty_like), or send a copy (.clone())"
            )
        self._check_peer(dst, "send to")
        self._check_peer(src, "receive from")
        leaving, expected = (dst, describe(send)), (src, describe(recv))
        with self.session.operation("exchange", leaving, expected):
            self.transport.exchange(outgoing, dst, incoming, src)
        return deliver(incoming, recv)

    def barrier(self) -> None:
        """Wait until every rank has come here. Counts no message."""
        with self.collective("barrier"):
            self.session.barrier()

    @contextmanager
    def collective(
        self, name: str, tensor: Tensor | None = None, option: str = ""
    ) -> Iterator[None]:
        """Announce a collective, which all ranks must call in the same order with equal shapes.

        One inside another (the ring's two halves) is part of it and is not announced.

        Args:
            name: the operation.
            tensor: what it works on; None leaves it out, when the ranks' tensors differ.
            option: what else must agree, such as the reduction or the root.

        Raises:
            MismatchError: another rank has called something else; both sequences are shown.
        """
        self.session.check_open()
        if self._inside_collective:
            yield
            return
        if tensor is not None:
            check_tensor(tensor, self.device)
        parts = (name, describe(tensor) if tensor is not None else "", option)
        self.session.announce(" ".join(part for part in parts if part))
        self._inside_collective = True
        try:
            yield
        finally:
            self._inside_collective = False

    def span(self, kind: str) -> AbstractContextManager[None]:
        """Record a region: ``compute``, ``update``, ``data`` or the name of a communication phase.

        Transfers inside a local region are ``communicate``; inside a phase they carry its name.
        """
        return self.session.recorder.region(kind)

    def progress(self, done: int, total: int, label: str = "") -> None:
        """Tell the notebook how far this rank is; it draws one bar while the run lasts."""
        self.session.board.progress(self.rank, done, total, label)

    @property
    def can_choose(self) -> bool:
        """Whether ``recv_any`` can leave the messages of some ranks waiting (on one machine)."""
        return self.session.doorbells is not None

    def _check_peer(self, peer: int, verb: str) -> None:
        if isinstance(peer, bool) or not isinstance(peer, int):
            raise ValueError(f"rank {self.rank} cannot {verb} {peer!r}: a rank is an integer")
        if not 0 <= peer < self.world_size:
            raise ValueError(
                f"rank {self.rank} cannot {verb} rank {peer}: with world size {self.world_size} "
                f"the ranks are 0 to {self.world_size - 1} (a ring wraps with % world_size)"
            )
        if peer == self.rank:
            raise ValueError(f"rank {self.rank} cannot {verb} itself: copy the tensor instead")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a comm belongs to its rank and its run, and cannot be sent to another process or "
            "returned: return tensors or numbers instead"
        )

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, world_size={self.world_size}, device={self.device})"
