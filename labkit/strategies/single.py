"""One device: the yardstick. Every synchronous technique has to end with the same parameters."""

from torch import Tensor, nn
from torch.nn import functional

from labkit.comm import Comm
from labkit.models import logits_of, state_of


class Single:
    """Plain training of the whole batch on one device."""

    def setup(self, comm: Comm, model: nn.Module, make_optimizer) -> None:
        if comm.world_size != 1:
            raise ValueError(
                f"single trains on one rank, got {comm.world_size}: use --world-size 1"
            )
        self.comm = comm
        self.model = model.to(comm.device).train()
        self.optimizer = make_optimizer(self.model.parameters())

    def share(self) -> tuple[int, int]:
        return 0, 1

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        with self.comm.span("compute"):
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(inputs), targets, reduction="sum")
            (loss / batch_size).backward()
        with self.comm.span("update"):
            self.optimizer.step()
        return loss

    def predict(self, inputs: Tensor) -> Tensor:
        return logits_of(self.model, inputs)

    def end_epoch(self) -> None:
        pass

    def full_state(self) -> dict[str, Tensor]:
        return state_of(self.model)
