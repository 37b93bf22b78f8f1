"""The messages of a rank that holds stages: activations to the next stage, gradients back.

A message is known by its kind, its micro-batch, and the chunk at this rank's end.
"""

from functools import partial
from typing import Any

from torch import Tensor

from labkit.comm.comm import Comm
from labkit.comm.work import Work, work_queue_of
from labkit.schedules.pipeline import Hop, Message


class Hops:
    """The hops of one training step on one rank, or with ``beside`` in a thread of their own.

    Attributes:
        outgoing, arrived: the tensors to send, and those received (or handed over from a stage on
            this rank), by (kind, micro-batch, chunk).
    """

    def __init__(self, comm: Comm, *, beside: bool):
        self.comm = comm
        self.beside = beside
        self.outgoing: dict[tuple[str, int, int], Tensor] = {}
        self.arrived: dict[tuple[str, int, int], Tensor] = {}
        self.receives: dict[tuple[str, int, int], Work] = {}
        self.under_way: list[Work] = []

    def run(self, hop: Hop, landing: Tensor | None) -> None:
        """Send, receive (into ``landing``), or both at once; beside the actions: begin to."""
        outgoing = self.outgoing.pop(_key(hop.send)) if hop.send else None
        if hop.recv and landing is not None:
            self.arrived[_key(hop.recv)] = landing
        if not self.beside:
            run_hop(self.comm, hop, outgoing, landing)
            return
        operation = partial(run_hop, hop=hop, outgoing=outgoing, landing=landing)
        tensors = [tensor for tensor in (outgoing, landing) if tensor is not None]
        work = work_queue_of(self.comm).add("hop", operation, tensors, tensors)
        self.under_way.append(work)
        if hop.recv:
            self.receives[_key(hop.recv)] = work

    def take(self, kind: str, micro_batch: int, chunk: int) -> Tensor:
        """Return a tensor that has arrived, after waiting for it."""
        receive = self.receives.pop((kind, micro_batch, chunk), None)
        if receive:
            with self.comm.span("wait"):
                receive.wait()
        return self.arrived.pop((kind, micro_batch, chunk))

    def wait(self) -> None:
        """Wait until all hops have ended."""
        for work in self.under_way:
            work.wait()


def run_hop(comm: Comm, hop: Hop, outgoing: Any, landing: Any) -> None:
    """Send ``outgoing``, receive into ``landing``, or both in a single exchange, as ``hop`` says.

    The tensor of an end that ``hop`` does not have is None.
    """
    if hop.send and hop.recv:
        comm.exchange(outgoing, hop.send.peer, landing, hop.recv.peer)
    elif hop.send:
        comm.send(outgoing, hop.send.peer)
    elif hop.recv:
        comm.recv(landing, hop.recv.peer)


def _key(message: Message) -> tuple[str, int, int]:
    return message.kind, message.micro_batch, message.chunk
