"""Comm: the one object through which learner code and strategies talk to other ranks.

Five operations (send, recv, recv_any, exchange, barrier). Each is timed (spans), and posted on the
status board before it starts, so that a run that stands still can be explained. How the bytes
travel, and counting them, is the transport's business (``labkit.comm.transports``).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from labkit.comm.board import LEFT, RECV_ANY, Board
from labkit.comm.channels import Channel, Doorbells
from labkit.comm.overlap import overlap
from labkit.comm.source_lines import caller_location
from labkit.comm.transports import Transport
from labkit.errors import PeerLostError
from labkit.trace import ClockTimer, CudaTimer, Recorder


class Comm:
    """One rank's way to the others.

    Attributes:
        rank: this rank, 0 .. world_size - 1.
        world_size: P, the number of ranks.
        device: where this rank's tensors live.
        messages: messages sent so far.
        bytes_sent: payload bytes sent so far.
        bytes_to: payload bytes sent so far, by peer.
        operations: calls of send, recv, recv_any and exchange so far: the rounds of an algorithm.
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
        self.operations = 0
        self._transport = transport
        self._board = board or Board(world_size)
        self._doorbells = doorbells
        self._told_lost: set[int] = set()
        on_gpu = device.type == "cuda"
        timer = CudaTimer(device) if on_gpu else ClockTimer()
        self._recorder = Recorder(rank, timer, keep=keep_spans)
        self._host = ClockTimer()
        self._closed = False
        self._inside_collective = False

    @property
    def messages(self) -> int:
        return self._transport.sent.messages

    @property
    def bytes_sent(self) -> int:
        return self._transport.sent.num_bytes

    @property
    def bytes_to(self) -> Counter[int]:
        return self._transport.sent.bytes_to

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send ``tensor`` (any shape, dense, any dtype) to rank ``dst``.

        Returns when the receive has begun and the tensor may be overwritten (gloo), or when the
        transfer is queued on the stream (NCCL). Counts 1 message.

        Raises:
            ValueError: ``dst`` is not another rank; the tensor is sparse or on another device.
            MismatchError: the receiver expects another shape or dtype.
            PeerLostError: the receiver has ended.
        """
        outgoing = self._outgoing(tensor)
        with self._operation("send", tensor, dst, None, None):
            self._transport.send(outgoing, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Receive into ``tensor`` in place, from rank ``src``; returns it. Counts no message.

        Raises:
            ValueError: ``src`` is not another rank; the tensor is sparse, on another device, or
                expanded (its elements share memory).
            MismatchError: the sender sends another shape or dtype.
            PeerLostError: the sender has ended.
        """
        incoming = self._incoming(tensor)
        with self._operation("recv", None, None, tensor, src):
            self._transport.recv(incoming, src)
        return self._deliver(incoming, tensor)

    def recv_add(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Receive from rank ``src`` and add it to ``tensor``, in place; returns it.

        In shared memory what comes is added straight out of the slots, segment by segment, while
        it is in the cache; other transports let it land first. Counts no message.

        Raises what ``recv`` raises, and ValueError for a tensor that is not contiguous.
        """
        self._check_tensor(tensor)
        if not tensor.is_contiguous():
            raise ValueError("recv_add needs a contiguous tensor: receive and add in two steps")
        with self._operation("recv", None, None, tensor, src):
            self._transport.recv_add(tensor.detach(), src)
        return tensor

    def recv_any(self, tensor: torch.Tensor, sources: Iterable[int]) -> int:
        """Receive into ``tensor`` in place, from whichever of ``sources`` sends; returns which.

        Of several that wait, the one that has waited longest comes first, so none starves. A
        source that has ended is named by one error; after it, recv_any goes on with the others.
        Counts no message. Ranks of several machines have to be on gloo, and no other rank may have
        something to send to this one meanwhile: see ``can_choose``.

        Raises:
            ValueError: as ``recv``; no sources.
            MismatchError: the sender sends another shape or dtype.
            PeerLostError: a source has ended (its ``rank`` says which); or all have.
        """
        self._check_open()
        sources = self._check_sources(sources)
        incoming = self._incoming(tensor)
        start = self._recorder.timer.mark()
        if self._doorbells is None:
            src = self._recv_unseen(incoming, sources)
            self._recorder.transfer(start, self._recorder.timer.mark(), 0, src)
        else:
            src = self._recv_first(tensor, incoming, sources, start)
        self._deliver(incoming, tensor)
        return src

    def _recv_first(self, tensor, incoming, sources: list[int], start) -> int:
        """Look on the board who is there, sleep until somebody is, and receive from that rank."""
        self._board.enter_any(self.rank, sources, describe(tensor), caller_location())
        try:
            src = self._doorbells.wait_for_sender(sources)
            with self._operation(RECV_ANY, None, None, tensor, src, start):
                self._transport.recv(incoming, src)
        except PeerLostError as error:
            self._board.leave(self.rank)
            self._told_lost |= {error.rank} - {None}
            raise
        return src

    def _recv_unseen(self, incoming: torch.Tensor, sources: list[int]) -> int:
        """Where no board shows who is there: over gloo, from whoever it is."""
        if not self._transport.receives_from_any:
            raise ValueError(
                f"recv_any from ranks {sources} needs a board that these ranks share: between "
                "machines use gloo"
            )
        try:
            src = self._transport.recv_any(incoming)
        except PeerLostError as error:
            raise PeerLostError(f"{RECV_ANY} broke off: {error}") from error
        if src not in sources:
            raise ValueError(
                f"rank {src} has sent to rank {self.rank}, which takes from {sources} only: "
                "between machines nobody else may send meanwhile"
            )
        self.operations += 1
        return src

    def _check_sources(self, sources: Iterable[int]) -> list[int]:
        """The sources that have not been told of as lost.

        Raises:
            PeerLostError: there are none left.
        """
        asked = list(dict.fromkeys(sources))
        if not asked:
            raise ValueError(f"rank {self.rank} cannot receive from any of no sources: name one")
        for source in asked:
            self._check_peer(source, "receive from")
        if left := [source for source in asked if source not in self._told_lost]:
            return left
        raise PeerLostError(f"all the sources have ended: ranks {asked}")

    def exchange(self, send: torch.Tensor, dst: int, recv: torch.Tensor, src: int) -> torch.Tensor:
        """Send ``send`` to ``dst`` while receiving ``recv`` from ``src``; returns ``recv``.

        The pair that cannot deadlock: every rank of a ring may call it at once. Counts 1 message.
        Raises what ``send`` and ``recv`` raise, and ValueError if the two tensors share memory:
        what arrives would overwrite what has not left yet.
        """
        outgoing, incoming = self._outgoing(send), self._incoming(recv)
        if overlap(send, recv):
            raise ValueError(
                f"rank {self.rank} cannot exchange {describe(send)} for {describe(recv)}, which "
                "share memory: what arrives would overwrite what has not left yet. Receive into "
                "a tensor of its own (torch.empty_like), or send a copy (.clone())"
            )
        with self._operation("exchange", send, dst, recv, src):
            self._transport.exchange(outgoing, dst, incoming, src)
        return self._deliver(incoming, recv)

    def barrier(self) -> None:
        """Wait until every rank has come here. Counts no message."""
        with self.collective("barrier"):
            start = self._recorder.timer.mark()
            with self._meeting("barrier"):
                self._transport.barrier()
            # A barrier has no payload, so all of it is waiting.
            end = self._recorder.timer.mark()
            self._recorder.transfer(start, end, 0, None, arrived=end if self._on_clock else None)

    @contextmanager
    def collective(
        self, name: str, tensor: torch.Tensor | None = None, option: str = ""
    ) -> Iterator[None]:
        """Announce a collective, which all ranks must call in the same order with equal shapes.

        One inside another (the ring's two halves) is part of it and is not announced.

        Args:
            name: the operation.
            tensor: what it works on; None leaves it out, when ranks bring different ones.
            option: what else must agree, such as the reduction or the root.

        Raises:
            MismatchError: another rank has called something else; both sequences are shown.
        """
        self._check_open()
        if self._inside_collective:
            yield
            return
        if tensor is not None:
            self._check_tensor(tensor)
        what = " ".join(
            part for part in (name, tensor is not None and describe(tensor), option) if part
        )
        self._board.announce(self.rank, what, caller_location())
        self._inside_collective = True
        try:
            yield
        finally:
            self._inside_collective = False

    @contextmanager
    def _meeting(self, op: str) -> Iterator[None]:
        """Inside a collective: this rank needs every other one to come to it."""
        self._board.enter_meeting(self.rank, op, self._host.mark())
        try:
            yield
        except PeerLostError as error:
            raise PeerLostError(f"a rank left before {op}: {error}") from error
        self._board.leave(self.rank)

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record a region: ``compute``, ``update``, ``data`` or the name of a communication phase.

        Transfers inside a local region are ``communicate``; inside a phase they carry its name.
        """
        with self._recorder.region(kind):
            yield

    @property
    def can_choose(self) -> bool:
        """Whether ``recv_any`` can leave the messages of some ranks waiting (on one machine)."""
        return self._doorbells is not None

    @property
    def shares_memory(self) -> bool:
        """Whether ``channel_to`` and ``channel_from`` reach the other ranks' memory."""
        return self._transport.shares_memory

    def channel_to(self, dst: int) -> Channel:
        """The slots in which rank ``dst`` reads what this rank writes (shared memory only)."""
        self._check_peer(dst, "send to")
        return self._transport.channel_to(dst)

    def channel_from(self, src: int) -> Channel:
        """The slots that rank ``src`` writes and this rank reads (shared memory only)."""
        self._check_peer(src, "receive from")
        return self._transport.channel_from(src)

    @contextmanager
    def streaming(self, name: str, dst: int) -> Iterator[None]:
        """Around a collective that moves its segments to ``dst`` through a channel by itself.

        Records one span, and tells the board that every rank has to come. Each message that the
        channel has counted is an operation.
        """
        sent = self._transport.sent.to[dst]
        messages, num_bytes = sent.messages, sent.num_bytes
        start = self._recorder.timer.mark()
        with self._meeting(name):
            yield
        self.operations += sent.messages - messages
        num_bytes = sent.num_bytes - num_bytes
        arrived = self._board.meeting_arrived_s(self.rank) if self._on_clock else None
        self._recorder.transfer(start, self._recorder.timer.mark(), num_bytes, dst, arrived)

    def progress(self, done: int, total: int, label: str = "") -> None:
        """Tell the notebook how far this rank is: it draws one bar while the run goes on."""
        self._board.progress(self.rank, done, total, label)

    def spans(self) -> list:
        """This rank's spans so far."""
        return self._recorder.spans()

    @property
    def posted(self) -> int:
        """Grows with whatever other ranks may wait for this one to end."""
        return self._board.posted(self.rank)

    def give_up(self, why: str) -> None:
        """Tell ranks that wait for this one, in shared memory, that it will not come."""
        self._board.give_up(self.rank, why)

    def set_timeout(self, timeout_s: float) -> None:
        """The longest wait for a message from here on."""
        self._transport.set_timeout(timeout_s)

    def leave(self) -> None:
        """Close, and tell ranks that wait for this one that it has left for good."""
        self.close()
        self._board.ranks[self.rank]["state"] = LEFT

    def abandon(self) -> None:
        """Let operations that still wait, in other threads, end with an error (shared memory)."""
        self._transport.abandon()

    def close(self) -> None:
        """End of the run: every later use is refused."""
        if self._transport.ends_together:
            with self._meeting("the end of the run"):
                self._transport.barrier()
        self._transport.close()
        self._closed = True

    def start_together(self) -> None:
        """Meet the other ranks, then make this moment second 0 of the trace on all of them."""
        self._board.ranks[self.rank]["origin_s"] = self._host.mark()
        self._transport.barrier()
        # One clock serves all ranks of a machine: the last one's arrival is the same for all.
        origin = float(self._board.ranks["origin_s"].max()) if self._on_clock else None
        self._recorder = Recorder(self.rank, self._recorder.timer, origin)

    def __reduce__(self):
        raise TypeError(
            "a comm belongs to its rank and its run, and cannot be sent to another process or "
            "returned: return tensors or numbers instead"
        )

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, world_size={self.world_size}, device={self.device})"

    @property
    def _on_clock(self) -> bool:
        return isinstance(self._recorder.timer, ClockTimer)

    @contextmanager
    def _operation(
        self,
        op: str,
        send: torch.Tensor | None,
        dst: int | None,
        recv: torch.Tensor | None,
        src: int | None,
        start=None,
    ) -> Iterator[None]:
        self._check_open()
        sent = expected = None
        sent_before = 0
        if send is not None:
            self._check_peer(dst, "send to")
            sent = (dst, describe(send))
            sent_before = self._transport.sent.to[dst].num_bytes
        if recv is not None:
            self._check_peer(src, "receive from")
            expected = (src, describe(recv))
        start = self._recorder.timer.mark() if start is None else start
        self._board.enter(self.rank, op, self._host.mark(), caller_location(), sent, expected)
        if send is not None and self._doorbells is not None:
            self._doorbells.ring(dst)
        try:
            yield
        except PeerLostError as error:
            peers = [peer for peer in dict.fromkeys((dst, src)) if peer is not None]
            names = " and ".join(f"rank {peer}" for peer in peers)
            lost = peers[0] if len(peers) == 1 else getattr(error, "rank", None)
            raise PeerLostError(f"{op} with {names} broke off: {error}", lost) from error
        self._board.leave(self.rank)
        self.operations += 1
        num_bytes = 0
        if send is not None:
            num_bytes = self._transport.sent.to[dst].num_bytes - sent_before
        arrived = self._board.arrived_s(self.rank, dst, src) if self._on_clock else None
        peer = src if dst is None else dst
        self._recorder.transfer(start, self._recorder.timer.mark(), num_bytes, peer, arrived)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(
                "this comm is used after the end of its run: start another with labkit.run"
            )

    def _check_peer(self, peer: int, verb: str) -> None:
        if isinstance(peer, bool) or not isinstance(peer, int):
            raise ValueError(f"rank {self.rank} cannot {verb} {peer!r}: a rank is a whole number")
        if not 0 <= peer < self.world_size:
            raise ValueError(
                f"rank {self.rank} cannot {verb} rank {peer}: with world size {self.world_size} "
                f"the ranks are 0 to {self.world_size - 1} (a ring wraps with % world_size)"
            )
        if peer == self.rank:
            raise ValueError(f"rank {self.rank} cannot {verb} itself: copy the tensor instead")

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"a tensor is needed, got {type(tensor).__name__}: {tensor!r:.60}")
        if tensor.layout != torch.strided:
            raise ValueError(f"a dense tensor is needed, got {tensor.layout}: use .to_dense()")
        if tensor.device.type != self.device.type:
            raise ValueError(
                f"the ranks of this run work on {self.device.type}, but the tensor is on "
                f"{tensor.device}: move it with .to(comm.device)"
            )

    def _outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        self._check_tensor(tensor)
        # A conjugate or negative view is a mark on the tensor, and its bytes are not its values.
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def _incoming(self, tensor: torch.Tensor) -> torch.Tensor:
        self._check_tensor(tensor)
        flat = tensor.detach()
        if flat.is_contiguous() and not flat.is_conj() and not flat.is_neg():
            return flat
        if any(step == 0 and size > 1 for step, size in zip(flat.stride(), flat.shape)):
            raise ValueError(
                "cannot receive into an expanded tensor: its elements share memory. "
                "Receive into a tensor of its own (.clone() or torch.empty)"
            )
        return torch.empty(flat.shape, dtype=flat.dtype, device=flat.device)

    @staticmethod
    def _deliver(landing: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        if landing.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(landing)
        return tensor


def describe(tensor: torch.Tensor) -> str:
    """What both ends of a message must agree on, for example ``float32 [3, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
