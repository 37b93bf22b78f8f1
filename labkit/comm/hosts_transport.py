"""Messages between ranks of several hosts: shared memory within a host, the network between."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from labkit import gpus
from labkit.comm.channels import Channel
from labkit.comm.shared_transport import SharedTransport
from labkit.comm.torch_transport import TorchTransport
from labkit.comm.transport import Transport


class HostsTransport(Transport):
    """Point-to-point through the memory of this host, or through a process group of all ranks.

    There are channels between the ranks of a host only. A collective of all ranks that would write
    directly into channels sends messages instead, so the counts are those of one host.

    (``Transport`` determines the methods and their number.)

    Args:
        near: for the ranks of this host; its arena has a place for every rank of the run.
        far: for all others; both ends of an edge agree on which of the two it is.
        neighbours: the ranks of this host.
    """

    def __init__(self, near: SharedTransport, far: TorchTransport, neighbours: Collection[int]):
        # Not ``super().__init__``: both count in the same counters.
        self.near, self.far, self.neighbours = near, far, frozenset(neighbours)
        self.sent = near.sent = far.sent
        self.receives_from_any = far.receives_from_any
        self.ends_together = near.ends_together
        self.queues = far.queues

    @property
    def collective(self) -> str:
        return self.far.collective

    @collective.setter
    def collective(self, name: str) -> None:
        self.far.collective = name

    def _to(self, peer: int) -> SharedTransport | TorchTransport:
        return self.near if peer in self.neighbours else self.far

    def send(self, tensor: Tensor, dst: int) -> None:
        self._to(dst).send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        self._to(src).recv(tensor, src)

    def recv_add(self, tensor: Tensor, src: int) -> None:
        self._to(src).recv_add(tensor, src)

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        way_out, way_in = self._to(dst), self._to(src)
        if way_out is way_in:
            way_out.exchange(send, dst, recv, src)
        elif way_out is self.far:
            # What goes over the network moves by itself once it has begun.
            with self.far.sending(send, dst):
                self.near.recv(recv, src)
        else:
            with self.far.receiving(recv, src):
                self.near.send(send, dst)

    @contextmanager
    def exchanging(self, send: Tensor, dst: int, recv: Tensor, src: int) -> Iterator[None]:
        is_far = self._to(dst) is self.far and self._to(src) is self.far
        with (self.far if is_far else super()).exchanging(send, dst, recv, src):
            yield

    def shares_memory_with(self, peer: int) -> bool:
        return peer in self.neighbours

    def channel_to(self, dst: int) -> Channel:
        return self._to(dst).channel_to(dst)

    def channel_from(self, src: int) -> Channel:
        return self._to(src).channel_from(src)

    def barrier(self) -> None:
        if self.near.ends_together:
            # On GPUs: what was queued on this host must have ended, too.
            gpus.synchronize(self.far.device)
        self.far.barrier()

    def expect(self, tensor: Tensor, sources: Sequence[int], ring: Callable[[], None]) -> None:
        self.far.expect(tensor, sources, ring)

    def arrived(self, tensor: Tensor, sources: Sequence[int]) -> Mapping[int, float]:
        return self.far.arrived(tensor, sources)

    def take_queued(self) -> list[Any]:
        return self.far.take_queued()

    def stream(self) -> int:
        return self.far.stream()

    def abort(self) -> None:
        self.far.abort()

    def set_timeout(self, timeout_s: float) -> None:
        self.near.set_timeout(timeout_s)
        self.far.set_timeout(timeout_s)

    def abandon(self) -> None:
        self.near.abandon()
        self.far.abandon()

    def close(self) -> None:
        self.near.close()
        self.far.close()
