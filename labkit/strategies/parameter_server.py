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

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from labkit.collectives import broadcast
from labkit.engine.comm.comm import Comm
from labkit.schedules.ring import chunk_bounds
from labkit.schedules.servers import server_turns, worker_turns
from labkit.strategies.base import MakeOptimizer
from labkit.strategies.flat_tensors import lay_end_to_end
from labkit.strategies.on_shares import OnShares
from labkit.strategies.saved_state import State
from labkit.strategies.traits import Division


@dataclass(eq=False)
class ParameterServer(OnShares):
    """Synchronous data parallelism through servers: all ranks wait for the slowest worker.

    Servers work on no samples; a batch is cut into P - K parts of almost equal size. With world
    size 1 the only rank is server and worker. Each server always adds in the same order, so a run
    can be repeated to the bit. Clipping needs the norm of all slices: K servers sum theirs,
    2 (K - 1) short messages per step; with amp ``fp16`` all ranks take part in this sum.

    Args:
        servers: K, below the world size (1 if the world size is 1).
    """

    straggler: tuple[int, float] | None = None
    sync_batch_norm: bool = False
    servers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers > 1:
            self.traits = replace(
                self.traits,
                division=Division.ELEMENTS,
                no_checkpoint=f"each of {self.servers} servers has a part of the optimizer's "
                "state (or take one)",
            )

    def check_ranks(self, world_size: int) -> None:
        if self.servers >= max(world_size, 2):
            raise ValueError(
                f"servers {self.servers} of world_size {world_size} leave no rank to work: use "
                f"fewer, or a world_size of {self.servers + 1} or more"
            )

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.move_to_device(comm, model)
        self.parameters, self.gradient = lay_end_to_end(self.trained)
        self.slice_bounds = chunk_bounds(self.parameters.numel(), self.servers)
        workers = comm.world_size - self.servers
        self.is_server = comm.rank < self.servers
        self.is_worker = comm.rank in self.workers
        # This rank's peers, in the order of ``schedules.servers``.
        if self.is_server:
            turns = server_turns(comm.rank, self.servers, workers)
            self.peers = [self.servers + worker for worker in turns]
            start, end = self.slice_bounds[comm.rank]
            self.slice = self.parameters[start:end]
            self.slice_gradient = self.gradient[start:end]
            if self.servers > 1:
                # Element by element (``traits.division``) a slice gets the same updates.
                self.trained = [nn.Parameter(self.slice)]
                self.trained[0].grad = self.slice_gradient
            # Momentum and the like exist here alone, once for each slice.
            self.optimizer = make_optimizer(self.trained)
        else:
            self.peers = worker_turns(comm.rank - self.servers, self.servers, workers)
            self.trained = []
        self.norm_ranks = range(self.servers)
        if self.precision.scaler.enabled:
            # Workers have to know only whether gradients have overflowed.
            self.norm_ranks = range(comm.world_size)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.gradient.zero_()
        loss = self.add_gradients(inputs, targets, batch_size)
        factor = self.gradient_factor(batch_size)
        if self.is_server:
            self.serve(factor)
        else:
            self.push()
            if self.precision.scaler.enabled:
                self.update(factor)
            self.pull()
        return loss

    def push(self) -> None:
        """Send each server its slice of a worker's gradient."""
        with self.comm.span("push"):
            for server in self.peers:
                start, end = self.slice_bounds[server]
                self.comm.send(self.gradient[start:end], server)

    def pull(self) -> None:
        """Receive each server's new values, straight into the parameters of a worker's model."""
        with self.comm.span("pull"):
            for server in self.peers:
                start, end = self.slice_bounds[server]
                self.comm.recv(self.parameters[start:end], server)

    @torch.no_grad()
    def serve(self, factor: Tensor | float | None = None) -> None:
        """Sum what all workers push to a server, update its slice, send it to all workers."""
        with self.comm.span("push"):
            for turn, worker in enumerate(self.peers):
                if turn == 0:
                    self.comm.recv(self.slice_gradient, worker)
                else:
                    self.comm.recv_add(self.slice_gradient, worker)
        self.update(factor)
        with self.comm.span("pull"):
            for worker in self.peers:
                self.comm.send(self.slice, worker)

    def full_state(self) -> State:
        # Workers have all slices already; each of several servers has only its own.
        if self.servers > 1:
            for server, (start, end) in enumerate(self.slice_bounds):
                broadcast(self.comm, self.parameters[start:end], root=server)
        return super().full_state()
