"""Some of the ranks, numbered anew: what a collective among only these ranks runs on."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from labkit.comm.comm import Comm


class SubComm(Comm):
    """A ``Comm`` of some ranks: the messages of ``comm``, its counters and its trace.

    For collectives that consist of messages. They are not announced,
    since the other ranks do not call them: announce a collective of all ranks around them.

    Args:
        comm: this rank's Comm.
        ranks: those that take part, this one among them; rank n here is ``ranks[n]`` there.
        phase: the kind of the spans of a ring's messages; None leaves it to the collective.
    """

    def __init__(self, comm: Comm, ranks: Sequence[int], phase: str | None = None):
        self.rank, self.world_size, self.device = ranks.index(comm.rank), len(ranks), comm.device
        self.hosts = (tuple(range(self.world_size)),)
        self.transport, self.session = comm.transport, comm.session
        self._comm, self._ranks, self._phase = comm, ranks, phase

    def send(self, tensor: Tensor, dst: int) -> None:
        self._comm.send(tensor, self._ranks[dst])

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        return self._comm.recv(tensor, self._ranks[src])

    def recv_add(self, tensor: Tensor, src: int) -> Tensor:
        return self._comm.recv_add(tensor, self._ranks[src])

    def recv_any(self, tensor: Tensor, sources: Iterable[int]) -> int:
        return self._ranks.index(self._comm.recv_any(tensor, [self._ranks[s] for s in sources]))

    def barrier(self) -> None:
        raise NotImplementedError("a barrier is for all ranks; dissemination_barrier is for some")

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> Tensor:
        return self._comm.exchange(send, self._ranks[dst], recv, self._ranks[src])

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
