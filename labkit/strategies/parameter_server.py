"""A parameter server: some ranks hold the parameters, the others compute gradients for them.

All trained parameters form one flat tensor [N], cut into K slices, one per server. In each step a
worker computes the gradient of its share of the batch, **pushes** each slice of it to that slice's
server, and **pulls** the slice's new values. A server sums what the workers push, makes the
update, and sends the result to each worker: the update is made once, not on every rank.

In a step, a server's link carries W slices in and W slices out, so a step takes longer with every
additional worker: ``costs.parameter_server_seconds``. More servers share the load. A worker's link
carries K slices out and K slices in.

Symbols: P ranks, K servers (ranks 0 to K - 1), W = P - K workers, N trainable parameters.
Source: Li et al., "Scaling distributed machine learning with the parameter server" (2014); this
is its synchronous case ("sequential consistency", section 3.4).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.collectives import broadcast
from labkit.comm.comm import Comm
from labkit.config import check_servers
from labkit.schedules.ring import chunk_bounds
from labkit.schedules.servers import server_turns, worker_turns
from labkit.strategies.base import MakeOptimizer, OnShares
from labkit.strategies.flat_parameters import average_buffers, lay_end_to_end
from labkit.strategies.state import State, cut, joined, load_state_of_parameter, state_of_parameter


@torch.no_grad()
def answer_one_by_one(comm: Comm, values: Tensor, lr: float = 0.1) -> None:
    """Naive, on rank 0: update the parameters [N] with each push, and answer it at once.

    Each worker pulls parameters without the pushes of the workers after it, so there is no longer
    one model that all of them train. W messages of N elements.
    """
    push = torch.empty_like(values)
    for worker in range(1, comm.world_size):
        comm.recv(push, worker)
        values -= lr * push
        comm.send(values, worker)


@dataclass(eq=False)
class ParameterServer(OnShares):
    """Synchronous data parallelism through servers: all ranks wait for the slowest worker.

    Servers work on no samples; a batch is cut into P - K parts of almost equal size. With world
    size 1 the only rank is server and worker. Each server always adds in the same order, so a run
    can be repeated to the bit; all workers pull the same bits.

    Batch statistics (BatchNorm): each worker normalises with the statistics of its own share; at
    the end of an epoch all ranks get the mean of the workers' running averages, and the first
    worker's counters.

    Clipping needs the norm of all slices: K servers sum theirs, 2 (K - 1) short messages per step.
    With amp ``fp16`` all ranks take part in this sum, which tells the workers, too, whether a
    gradient has overflowed.

    Args:
        servers: K, below the world size (1 if the world size is 1).
        accumulate, amp, straggler, sync_batch_norm: see ``OnShares``; servers take no part.
    """

    straggler: tuple[int, float] | None = None
    sync_batch_norm: bool = False
    servers: int = 1
    optimizes = "elements"

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        check_servers(self.servers, comm.world_size)
        self.place(comm, model)
        self.compute_with(self.model)
        self.parameters, self.gradient = lay_end_to_end(self.model)
        self.slices = chunk_bounds(self.parameters.numel(), self.servers)
        workers, parameters = comm.world_size - self.servers, []
        self.serves, self.works = comm.rank < self.servers, comm.rank in self.workers
        # This rank's peers, in the order of ``schedules.servers``.
        if self.serves:
            turns = server_turns(comm.rank, self.servers, workers)
            self.peers = [self.servers + worker for worker in turns]
            start, end = self.slices[comm.rank]
            # SGD works element by element, so a slice gives the same updates as its parameters.
            self.slice, self.slice_gradient = self.parameters[start:end], self.gradient[start:end]
            parameters = [nn.Parameter(self.slice)]
            parameters[0].grad = self.slice_gradient
            self.optimizer = make_optimizer(parameters)
        else:
            self.peers = worker_turns(comm.rank - self.servers, self.servers, workers)
        # Workers have to know only whether gradients have overflowed.
        ranks = range(comm.world_size if self.scaler.is_enabled() else self.servers)
        self.update = self.update_of(parameters, comm=comm, ranks=ranks)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        if self.works:
            self.gradient.zero_()
        # In fp16 a sum over the batch would overflow sooner than the mean.
        divisor = batch_size if self.scaler.is_enabled() else 1
        loss = self.gradients.add(inputs, targets, batch_size, divisor)
        if self.serves:
            self.serve(batch_size // divisor)
        else:
            self.push()
            if self.scaler.is_enabled():
                with self.comm.span("update"):
                    self.update()
            self.pull()
        return loss

    def push(self) -> None:
        """On a worker: send each server its slice of the gradient."""
        with self.comm.span("push"):
            for server in self.peers:
                start, end = self.slices[server]
                self.comm.send(self.gradient[start:end], server)

    def pull(self) -> None:
        """On a worker: receive each server's new values, straight into the model's parameters."""
        with self.comm.span("pull"):
            for server in self.peers:
                start, end = self.slices[server]
                self.comm.recv(self.parameters[start:end], server)

    @torch.no_grad()
    def serve(self, batch_size: int) -> None:
        """On a server: sum what all workers push, update the slice, send it to all workers."""
        with self.comm.span("push"):
            for turn, worker in enumerate(self.peers):
                receive = self.comm.recv_add if turn else self.comm.recv
                receive(self.slice_gradient, worker)
        with self.comm.span("update"):
            self.slice_gradient /= batch_size
            self.update()
        with self.comm.span("pull"):
            for worker in self.peers:
                self.comm.send(self.slice, worker)

    def optimizer_state(self, parameters: Mapping[str, Tensor]) -> State:
        """Rank 0 gets the slices of the other servers, so that each parameter is whole."""
        mine, comm = State(), self.comm
        if self.serves:
            (flat,) = self.update.parameters
            mine = state_of_parameter(self.optimizer, flat)
        for key, value in mine.items() if self.servers > 1 else ():
            # A number is the same on all servers.
            if value.dim() and comm.rank:
                comm.send(value.to(comm.device), 0)
            elif value.dim():
                rest = [value.new_empty(end - start) for start, end in self.slices[1:]]
                mine[key] = torch.cat(
                    [value, *(comm.recv(part, rank) for rank, part in enumerate(rest, start=1))]
                )
        return cut(mine, parameters) if comm.rank == 0 else {}

    def load_optimizer_state(self, parameters: Mapping[str, Tensor], state: State) -> None:
        whole = joined(state, parameters)
        start, end = self.slices[self.comm.rank]
        mine = {key: value[start:end] if value.dim() else value for key, value in whole.items()}
        load_state_of_parameter(self.optimizer, self.update.parameters[0], mine)

    def end_epoch(self) -> None:
        average_buffers(self.comm, self.model, self.workers, self.sync_batch_norm)

    def full_state(self) -> dict[str, Tensor]:
        # Workers have all slices already; each of several servers has only its own.
        if self.servers > 1:
            for server, (start, end) in enumerate(self.slices):
                broadcast(self.comm, self.parameters[start:end], root=server)
        return super().full_state()
