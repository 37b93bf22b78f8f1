"""Distributed data parallelism: communication overlaps with the rest of backward.

A training step on top of ``labkit.strategies.ddp.bucketed``: each rank computes the gradient of
(sum of its losses) / (samples in the global batch), and the replicas sum these gradients.

The loss is divided, because it is one number and the gradients are many. The sum over the ranks is
then the gradient of the mean over the global batch, whatever the sizes of the shares.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer, OnShares
from labkit.strategies.ddp.bucketed import BucketedDDP
from labkit.strategies.state import State


@dataclass(eq=False)
class DDP(OnShares):
    """Synchronous data parallelism with ``BucketedDDP``.

    Batch statistics (BatchNorm): each rank normalises with the statistics of its own share; all
    replicas have rank 0's running averages, as in PyTorch's DDP. The gradients of a rank without
    samples count as zeros.

    Args:
        bucket_mb: MiB of gradients that are summed together; 0 gives every parameter a bucket.
        accumulate, amp, straggler, sync_batch_norm: see ``OnShares``; one synchronisation per
            update.
        hierarchical: sum inside each host first, then between hosts: see
            ``labkit.collectives.hierarchical``.
    """

    straggler: tuple[int, float] | None = None
    sync_batch_norm: bool = False
    bucket_mb: float = 25
    hierarchical: bool = False
    replaces_buffers = True

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.place(comm, model)
        options = {"bucket_mb": self.bucket_mb, "hierarchical": self.hierarchical}
        self.replica = BucketedDDP(comm, self.model, op="sum", **options)
        self.compute_with(self.replica)
        self.optimizer = make_optimizer(self.replica.trained)
        self.update = self.update_of(self.replica.trained)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.gradients.add(inputs, targets, batch_size, no_sync=self.replica.no_sync)
        if not len(targets) and self.global_batch is None:
            self.replica.without_samples()
        with self.comm.span("update"):
            self.update()
        return loss

    def state(self) -> State:
        behind = torch.tensor(self.replica.buffers_behind)
        return super().state() | {"own/buffers_behind": behind}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_state(state)
        self.replica.buffers_behind = bool(state.get("own/buffers_behind", True))

    def end_epoch(self) -> None:
        self.replica.broadcast_buffers()
