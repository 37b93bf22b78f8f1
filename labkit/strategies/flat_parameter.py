"""A flat parameter of sharded data parallelism: who holds it, gathers it, and sums its gradient.

Symbols: P ranks, N elements of a flat.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from labkit.collectives.ring import share_only, share_reduce, split_chunks
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.work import Work, work_queue_of
from labkit.schedules.ring import owned_chunk
from labkit.strategies.flat_tensors import flatten, views_of


class Flat:
    """Some parameters as one tensor ``full`` [N], cut into P ``chunks``.

    The parameters may be on the host: only this flat moves to the device.

    Attributes:
        shard: this rank's chunk, which its optimizer changes. In stage 3 it is a copy, as ``full``
            has memory between ``unshard`` and ``reshard`` alone (a new flat is unsharded, too).
        full_gradient: [N], of which the parameters' gradients are views: in stage 1 always, else
            between ``allocate_gradient`` and ``reduce``.
        shard_gradient: the shard's part of the sum over ranks.
        in_flight: the tensor that is gathered ahead, or reduced.
    """

    def __init__(self, comm: Comm, stage: int, parameters: list[nn.Parameter]):
        self.comm = comm
        self.stage = stage
        self.parameters = parameters
        self.trained = parameters[0].requires_grad
        self.full = flatten(parameters).to(comm.device)
        self.full_bytes = self.full.nbytes
        self.num_elements = self.full.numel()
        for parameter, view in zip(parameters, views_of(self.full, parameters)):
            parameter.data = view
        self.owned = owned_chunk(comm.rank, comm.world_size)
        self.chunks = split_chunks(self.full, comm.world_size)
        our_chunk = self.chunks[self.owned]
        if stage == 3:
            our_chunk = our_chunk.clone()
        self.shard = nn.Parameter(our_chunk, self.trained)
        self.work: Work | None = None
        self.in_flight: Tensor | None = None
        self.full_gradient: Tensor | None = None
        self.shard_gradient = torch.zeros_like(our_chunk)
        if self.trained:
            if stage == 1:
                gradient = self.allocate_gradient()
                self.shard_gradient = split_chunks(gradient, comm.world_size)[self.owned]
            self.shard.grad = self.shard_gradient

    def unshard(self) -> None:
        """Begin the all-gather (share-only) of all ranks' shards into ``full``."""
        self.full.untyped_storage().resize_(self.full_bytes)

        def all_gather_shards(comm: Comm) -> None:
            self.chunks[self.owned].copy_(self.shard)
            share_only(comm, self.chunks)

        self.in_flight = self.full
        queue = work_queue_of(self.comm)
        self.work = queue.add("share_only", all_gather_shards, [self.full], [])

    def wait(self) -> None:
        """Wait until the last ``unshard`` or ``reduce`` has ended."""
        if self.work:
            with self.comm.span("wait"):
                self.work.wait()
        self.work = None
        self.in_flight = None

    def reshard(self) -> None:
        """Free the memory of ``full``; the shard stays."""
        # What autograd keeps of it are views: they show the values of the next unshard.
        self.full.untyped_storage().resize_(0)

    def allocate_gradient(self) -> Tensor:
        """Give the parameters gradients, zeros at first; returns ``full_gradient``."""
        if self.full_gradient is None:
            self.full_gradient = torch.zeros_like(self.full)
            views = views_of(self.full_gradient, self.parameters)
            for parameter, view in zip(self.parameters, views):
                parameter.grad = view
        return self.full_gradient

    def zero_gradient(self) -> None:
        """Begin a step: set to zero what backward adds to, or what ``reduce`` adds to."""
        if self.full_gradient is None:
            self.shard_gradient.zero_()
        else:
            self.full_gradient.zero_()

    def reduce(self) -> None:
        """Begin the reduce-scatter (share-reduce) of ``full_gradient``."""
        gradient = self.allocate_gradient()
        chunks = split_chunks(gradient, self.comm.world_size)

        def reduce_scatter_gradient(comm: Comm) -> None:
            share_reduce(comm, chunks)
            if self.stage > 1:
                self.shard_gradient += chunks[self.owned]

        queue = work_queue_of(self.comm)
        self.work = queue.add("share_reduce", reduce_scatter_gradient, [gradient], [])
        if self.stage > 1:
            self.in_flight = gradient
            self._drop_full_gradient()

    def _drop_full_gradient(self) -> None:
        self.full_gradient = None
        for parameter in self.parameters:
            parameter.grad = None

    def clear(self) -> None:
        """Drop what is left of a pass that an exception has ended."""
        self.wait()
        self.shard_gradient.zero_()
        if self.stage > 1:
            self._drop_full_gradient()
        if self.stage == 3:
            self.reshard()

    def full_values(self, shard: Tensor) -> list[Tensor]:
        """Values by parameter, from the ranks' shards of them; a collective call."""
        full = shard.new_empty(self.num_elements)
        chunks = split_chunks(full, self.comm.world_size)
        chunks[self.owned].copy_(shard.detach())
        share_only(self.comm, chunks)
        return views_of(full, self.parameters)

    def shard_of(self, values: list[Tensor]) -> Tensor:
        """This rank's shard of values by parameter, the reverse of ``full_values``."""
        return split_chunks(flatten(values), self.comm.world_size)[self.owned]


# The method that executes an instruction of ``sharded_pass``. One method waits for both kinds of
# collective: a flat has one under way at a time.
OPERATIONS: dict[str, Callable[[Flat], object]] = {
    "gather": Flat.unshard,
    "wait": Flat.wait,
    "free": Flat.reshard,
    "begin": Flat.allocate_gradient,
    "reduce": Flat.reduce,
    "finish": Flat.wait,
}
