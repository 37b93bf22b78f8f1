"""Messages between ranks of several hosts: shared memory within a host, the network between."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from labkit.comm.shared_transport import SharedTransport
from labkit.comm.torch_transport import TorchTransport
from labkit.comm.transport import Transport


class HostsTransport(Transport):
    """Point-to-point through the memory of this host, or through a process group of all ranks.

    A collective of all ranks that would write directly into channels sends messages instead, so
    the counts are those of one host.

    Args:
        near: for the ranks of this host; its arena has a place for every rank of the run.
        far: for all others; both ends of an edge agree on which of the two it is.
        neighbours: the ranks of this host.
    """

    receives_from_any = True

    def __init__(self, near: SharedTransport, far: TorchTransport, neighbours: Collection[int]):
        self.near, self.far, self.neighbours = near, far, frozenset(neighbours)
        self.sent = near.sent = far.sent

    def to(self, peer: int) -> Transport:
        return self.near if peer in self.neighbours else self.far

    def send(self, tensor: Tensor, dst: int) -> None:
        self.to(dst).send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        self.to(src).recv(tensor, src)

    def recv_add(self, tensor: Tensor, src: int) -> None:
        self.to(src).recv_add(tensor, src)

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        # What goes over the network moves by itself once it has begun.
        if self.to(dst) is self.to(src):
            self.to(dst).exchange(send, dst, recv, src)
        elif self.to(dst) is self.far:
            with self.far.sending(send, dst):
                self.near.recv(recv, src)
        else:
            with self.far.receiving(recv, src):
                self.near.send(send, dst)

    @contextmanager
    def exchanging(self, send: Tensor, dst: int, recv: Tensor, src: int) -> Iterator[None]:
        is_far = self.to(dst) is self.far and self.to(src) is self.far
        with (self.far if is_far else super()).exchanging(send, dst, recv, src):
            yield

    def expect(self, tensor: Tensor, sources: Sequence[int]) -> None:
        self.far.expect(tensor, sources)

    def arrived(self, tensor: Tensor, sources: Sequence[int]) -> Mapping[int, float]:
        return self.far.arrived(tensor, sources)

    def barrier(self) -> None:
        self.far.barrier()

    def set_timeout(self, timeout_s: float) -> None:
        self.near.set_timeout(timeout_s)
        self.far.set_timeout(timeout_s)

    def abandon(self) -> None:
        self.near.abandon()

    def close(self) -> None:
        self.near.close()
