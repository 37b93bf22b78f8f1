"""Local SGD: ranks make updates of their own, and average the parameters now and then.

Every rank makes K updates by the gradients of its own share, and then each parameter becomes the
mean over the ranks. That is 1 / K of DDP's bytes. Momenta stay local: with SGD, momentum or not,
an update is linear in the gradient, so with K = 1 the mean parameters depend on the mean gradients
alone, and are those of DDP. With K > 1, or with Adam, they are others.

**DiLoCo** does not stop at that mean. How far the mean has moved since the average before it
counts as a gradient, of which an outer SGD with Nesterov's momentum makes an update. Every rank
makes the same one, so the bytes are those of local SGD.

Sources: Stich, "Local SGD converges fast and communicates little" (2019), algorithm 1; Lin et al.,
"Don't use large mini-batches, use local SGD" (2020); Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models" (2023), algorithm 1.
"""

import torch
from torch import Tensor, nn

from labkit.collectives import (
    broadcast,
    broadcast_coalesced,
    fast_hierarchical_all_reduce,
    fast_ring_all_reduce,
)
from labkit.engine.comm.comm import Comm
from labkit.strategies.base import make_dense, trained_parameters
from labkit.strategies.flat_tensors import flatten, views_of


class LocalSGD:
    """A replica of ``module`` whose parameters are averaged; ``outer_step`` makes it DiLoCo."""

    def __init__(
        self, comm: Comm, module: nn.Module, hierarchical: bool, outer_step: "OuterStep | None"
    ):
        self.comm = comm
        self.module = module
        self.all_reduce = fast_hierarchical_all_reduce if hierarchical else fast_ring_all_reduce
        self.outer_step = outer_step
        self.trained = trained_parameters(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(comm, tensor)
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(make_dense)
        if outer_step is not None:
            outer_step.begin(flatten(self.trained))

    @torch.no_grad()
    def average(self) -> None:
        """Give each parameter the mean over the ranks, in one all-reduce; buffers are rank 0's."""
        flat = flatten(self.trained)
        self.all_reduce(self.comm, flat, "mean")
        if self.outer_step is not None:
            self.outer_step.update(flat)
        for parameter, mean in zip(self.trained, views_of(flat, self.trained)):
            parameter.copy_(mean)
        broadcast_coalesced(self.comm, self.module.buffers())


class OuterStep:
    """DiLoCo's outer SGD with Nesterov's momentum, the same on all ranks.

    Args:
        lr: above 0; 1 without momentum takes the mean as it is, to the bit.
        momentum: in [0, 1), of the outer gradients, as ``torch.optim.SGD(nesterov=True)`` counts.
    """

    def __init__(self, lr: float, momentum: float):
        if lr <= 0:
            raise ValueError(f"outer_lr must be above 0, got {lr}: parameters would never move")
        if not 0 <= momentum < 1:
            raise ValueError(
                f"outer_momentum must be at least 0 and below 1, got {momentum}: with 1 or more "
                "no outer gradient is ever forgotten"
            )
        self.lr = lr
        self.momentum = momentum

    def begin(self, parameters: Tensor) -> None:
        """Take the parameters [N] that all ranks start with."""
        self.parameters = parameters
        self.velocity = torch.zeros_like(parameters)

    def update(self, mean: Tensor) -> None:
        """Replace the ranks' ``mean`` [N] by the parameters after the outer step."""
        outer_gradient = self.parameters - mean
        self.velocity = self.momentum * self.velocity + outer_gradient
        # parameters - lr (gradient + momentum velocity), so written that lr 1 keeps the mean.
        mean += (1 - self.lr) * outer_gradient - self.lr * self.momentum * self.velocity
        self.parameters = mean.clone()
