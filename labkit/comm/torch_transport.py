"""Point-to-point messages over ``torch.distributed``: gloo or NCCL, on any number of machines."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.comm.transport import Transport, as_bytes
from labkit.errors import PeerLostError


class TorchTransport(Transport):
    """Point-to-point through a process group.

    Tensors are sent as bytes, so that every dtype works. With gloo, CUDA tensors are staged
    through host memory, because gloo's point-to-point moves host memory only.

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
        self._group = group or dist.distributed_c10d._get_default_group()
        # The argument of each wait; empty for the group's own timeout.
        self._patience: tuple[timedelta, ...] = ()

    def send(self, tensor: Tensor, dst: int) -> None:
        outgoing = self._outgoing(tensor)
        with _loss_of_a_peer():
            self._group.send([outgoing], dst, 0).wait(*self._patience)
        self.sent.to[dst].count(outgoing.nbytes)

    def recv(self, tensor: Tensor, src: int) -> None:
        with self._landing(tensor) as landing:
            self._group.recv([landing], src, 0).wait(*self._patience)

    def recv_any(self, tensor: Tensor) -> int:
        with self._landing(tensor) as landing:
            work = self._group.recv_anysource([landing], 0)
            work.wait(*self._patience)
        return work._source_rank()

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        outgoing = self._outgoing(send)
        with self._landing(recv) as landing:
            if landing.device.type == "cuda":
                # NCCL matches the two only when they are issued as one group.
                ends = [
                    dist.P2POp(dist.isend, outgoing, dst),
                    dist.P2POp(dist.irecv, landing, src),
                ]
                works = dist.batch_isend_irecv(ends)
            else:
                works = [self._group.send([outgoing], dst, 0), self._group.recv([landing], src, 0)]
            for work in works:
                work.wait(*self._patience)
        self.sent.to[dst].count(outgoing.nbytes)

    def barrier(self) -> None:
        with _loss_of_a_peer():
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
        with _loss_of_a_peer():
            yield landing
        if self.staged:
            tensor.copy_(landing)


@contextmanager
def _loss_of_a_peer() -> Iterator[None]:
    """Turn PyTorch's RuntimeError into a PeerLostError, without the C++ stack that follows."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip() or type(error).__name__
        raise PeerLostError(text.splitlines()[0]) from error
