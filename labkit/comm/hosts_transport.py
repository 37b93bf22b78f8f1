"""Messages between ranks of several hosts: shared memory within a host, the network between."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor

from labkit.comm.shared_transport import SharedTransport
from labkit.comm.torch_transport import TorchTransport
from labkit.comm.transport import OverTransports, Transport


class HostsTransport(OverTransports):
    """Point-to-point through the memory of this host, or through a process group of all ranks.

    There are channels between the ranks of a host only. A collective of all ranks that would write
    directly into channels sends messages instead, so the counts are those of one host.

    Args:
        near: for the ranks of this host; its arena has a place for every rank of the run.
        far: for all others; both ends of an edge agree on which of the two it is.
        neighbours: the ranks of this host.
    """

    def __init__(self, near: SharedTransport, far: TorchTransport, neighbours: Collection[int]):
        super().__init__(far, near)
        self.near, self.far, self.neighbours = near, far, frozenset(neighbours)
        near.sent = far.sent

    def to(self, peer: int) -> Transport:
        return self.near if peer in self.neighbours else self.far

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        # What goes over the network moves by itself once it has begun.
        if self.to(dst) is self.to(src):
            super().exchange(send, dst, recv, src)
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
