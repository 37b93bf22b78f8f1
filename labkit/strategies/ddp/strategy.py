"""Distributed data parallelism: communication overlaps with the rest of backward.

A training step on top of ``labkit.strategies.ddp.bucketed``: each rank computes the gradient of
(sum of its losses) / (samples in the global batch), and the replicas sum these gradients.

The loss is divided, because it is one number and the gradients are many. The sum over the ranks is
then the gradient of the mean over the global batch, whatever the sizes of the shares.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.strategies.ddp.bucketed import BucketedDDP
from labkit.strategies.kept import Kept
from labkit.strategies.local_gradients import LocalGradients
from labkit.strategies.sync_batch_norm import convert
from labkit.strategies.update import Update


class DDP(Strategy):
    """Synchronous data parallelism with ``BucketedDDP``.

    Batch statistics (BatchNorm): each rank normalises with the statistics of its own share; all
    replicas have rank 0's running averages, as in PyTorch's DDP. The gradients of a rank without
    samples count as zeros.

    Args:
        bucket_mb: MiB of gradients that are summed together; 0 gives every parameter a bucket.
        accumulate, amp, straggler: see ``LocalGradients``; one synchronisation per update.
        sync_batch_norm: BatchNorm normalises with the statistics of the global batch.
        hierarchical: sum inside each host first, then between hosts: see
            ``labkit.collectives.hierarchical``.
    """

    def __init__(
        self,
        bucket_mb: float = 25,
        accumulate: int = 1,
        amp: str | None = None,
        straggler: tuple[int, float] | None = None,
        sync_batch_norm: bool = False,
        hierarchical: bool = False,
    ):
        self.bucket_mb, self.sync_batch_norm = bucket_mb, sync_batch_norm
        self.hierarchical = hierarchical
        self.settings = {"accumulate": accumulate, "amp": amp, "straggler": straggler}

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.comm = comm
        self.model = model.to(comm.device).train()
        if self.sync_batch_norm:
            count = self.settings["accumulate"]
            self.global_batch = convert(self.model, comm, self.workers, count)
        options = {"bucket_mb": self.bucket_mb, "hierarchical": self.hierarchical}
        self.replica = BucketedDDP(comm, self.model, op="sum", **options)
        self.optimizer = make_optimizer(self.replica.trained)
        self.gradients = LocalGradients(
            comm, self.replica, loss=self.loss, global_batch=self.global_batch, **self.settings
        )
        self.scaler = self.gradients.scaler
        self.update = Update(
            self.optimizer, self.replica.trained, clip_norm=self.clip_norm, scaler=self.scaler
        )

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.optimizer.zero_grad()
        no_sync = self.replica.no_sync
        sizes = self.common_sizes(batch_size)
        loss = self.gradients.add(inputs, targets, batch_size, no_sync, sizes=sizes)
        if not len(targets) and sizes is None:
            self.replica.without_samples()
        with self.comm.span("update"):
            self.update()
        return loss

    def kept(self) -> Kept:
        kept = super().kept()
        if self.comm.rank:
            # Rank 0's replace them before they are used.
            kept.buffers = {}
        kept.own["buffers_behind"] = torch.tensor(self.replica.buffers_behind)
        return kept

    def continued(self, own: Mapping[str, Tensor]) -> None:
        self.replica.buffers_behind = bool(own.get("buffers_behind", True))

    def end_epoch(self) -> None:
        self.replica.broadcast_buffers()
