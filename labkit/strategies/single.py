"""Training on one device: the reference for all synchronous techniques.

Each of them has to end with the same parameters.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer, OnShares


@dataclass(eq=False)
class Single(OnShares):
    """Plain training of the whole batch on one device.

    Args:
        accumulate, amp: see ``LocalGradients``.
        sync_batch_norm: nothing changes, as one device sees the whole batch.
    """

    sync_batch_norm: bool = False

    def check_ranks(self, world_size: int) -> None:
        if world_size != 1:
            raise ValueError(
                f"strategy single trains on one rank, got world_size {world_size}: use world_size "
                "1, or another strategy"
            )

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.check_ranks(comm.world_size)
        self.place(comm, model)
        self.compute_with(self.model)
        self.optimizer = make_optimizer(self.model.parameters())
        self.update = self.update_of(self.model.parameters())

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.gradients.add(inputs, targets, batch_size)
        with self.comm.span("update"):
            self.update()
        return loss
