"""One device: the yardstick. Every synchronous technique has to end with the same parameters.

That is for models without layers that draw random numbers (dropout): each rank draws its own.
"""

from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.strategies.local_gradients import LocalGradients
from labkit.workload.models import logits_of, state_of


class Single:
    """Plain training of the whole batch on one device.

    Args:
        accumulate, amp: see ``LocalGradients``.
    """

    def __init__(self, accumulate: int = 1, amp: str | None = None):
        self.settings = {"accumulate": accumulate, "amp": amp}

    def setup(self, comm: Comm, model: nn.Module, make_optimizer) -> None:
        if comm.world_size != 1:
            raise ValueError(
                f"single trains on one rank, got {comm.world_size}: use --world-size 1"
            )
        self.comm = comm
        self.model = model.to(comm.device).train()
        self.optimizer = make_optimizer(self.model.parameters())
        self.gradients = LocalGradients(comm, self.model, **self.settings)

    def share(self) -> tuple[int, int]:
        return 0, 1

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.gradients.add(inputs, targets, divisor=batch_size)
        self.gradients.update(self.optimizer)
        return loss

    def predict(self, inputs: Tensor) -> Tensor:
        return logits_of(self.model, inputs)

    def end_epoch(self) -> None:
        pass

    def full_state(self) -> dict[str, Tensor]:
        return state_of(self.model)
