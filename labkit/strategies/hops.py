"""The messages of a rank that holds stages: activations to the next stage, gradients back."""

from functools import partial
from typing import Any

from torch import Tensor

from labkit.engine.comm.comm import Comm
from labkit.engine.comm.work import Work, work_queue_of
from labkit.schedules.pipeline import Hop, Message


class Hops:
    """The messages of one rank in one step; with ``beside`` they move in a thread of their own.

    ``outgoing`` and ``incoming`` are the tensors to send, and those received, by message.
    """

    def __init__(self, comm: Comm, *, beside: bool):
        self.comm = comm
        self.beside = beside
        self.outgoing: dict[Message, Tensor] = {}
        self.incoming: dict[Message, Tensor] = {}
        self.under_way: list[Work] = []
        self.receives: dict[Message, Work] = {}

    def hand_on(self, message: Message, tensor: Tensor) -> None:
        """Keep a tensor for the hop that sends it; a rank alone has the next stage itself."""
        if message.peer == self.comm.rank:
            self.incoming[message] = tensor
        else:
            self.outgoing[message] = tensor

    def run(self, hop: Hop, landing: Tensor | None) -> None:
        """Send, receive (into ``landing``), or both at once; with ``beside``, only begin to."""
        outgoing = None
        if hop.send:
            outgoing = self.outgoing.pop(hop.send)
        if hop.recv and landing is not None:
            self.incoming[hop.recv] = landing
        if not self.beside:
            run_hop(self.comm, hop, outgoing, landing)
            return
        operation = partial(run_hop, hop=hop, outgoing=outgoing, landing=landing)
        tensors = [tensor for tensor in (outgoing, landing) if tensor is not None]
        work = work_queue_of(self.comm).add("hop", operation, tensors, tensors)
        self.under_way.append(work)
        if hop.recv:
            self.receives[hop.recv] = work

    def take(self, message: Message) -> Tensor:
        """Return a tensor that has arrived, after waiting for it."""
        if message in self.receives:
            with self.comm.span("wait"):
                self.receives.pop(message).wait()
        return self.incoming.pop(message)

    def wait(self) -> None:
        """Wait until all hops have ended."""
        if self.under_way:
            with self.comm.span("wait"):
                for work in self.under_way:
                    work.wait()


def run_hop(comm: Comm, hop: Hop, outgoing: Any, landing: Any) -> None:
    """Send ``outgoing``, receive into ``landing``, or both in a single exchange, as ``hop`` says.

    The tensor of an end that ``hop`` does not have is None.
    """
    if hop.send and outgoing is None:
        reason = "an activation is what the layers have made"
        if hop.send.kind == "gradient":
            reason = "a gradient is left in .grad of an input that requires one"
        message = f"the {hop.send.kind} of micro-batch {hop.send.micro_batch}"
        raise ValueError(f"{message} to be sent is None: {reason}")
    if hop.send and hop.recv:
        comm.exchange(outgoing, hop.send.peer, landing, hop.recv.peer)
    elif hop.send:
        comm.send(outgoing, hop.send.peer)
    elif hop.recv:
        comm.recv(landing, hop.recv.peer)
